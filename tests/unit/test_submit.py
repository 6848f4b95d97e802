"""A filled job template is what was asked for, and still a job script that a shell can trust."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.cli import submit

NAMES = ["apptainer", "array", "cpu", "elastic", "gpu", "hybrid", "requeue", "store", "torchrun"]
FOLDER = Path(__file__).parents[2] / "slurm"


def filled(capsys, name, *arguments):
    assert submit.run(["--template", name, "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def site(template):
    """Return the lines between the two marks."""
    lines = template.splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("# ----")]
    assert len(marks) == 2
    return lines[marks[0] + 1 : marks[1]]


def test_every_template_can_be_filled_in():
    assert list(submit.templates()) == NAMES == sorted(path.stem for path in FOLDER.glob("*.sbatch"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_site_edits_stands_together_at_the_top(name):
    text = (FOLDER / f"{name}.sbatch").read_text()
    assert re.match(r"#!/usr/bin/env bash\n# [A-Z][^\n?]*\.\n", text)  # what it is, in a sentence
    assert "\nset -euo pipefail\n" in text
    block = site(text)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives
    assert set(directives) < set(block)
    assert len(submit.settings("\n".join(block))) == len(submit.settings(text)) == text.count(': "${HPCDIST_')


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_shellcheck_finds_nothing(name, capsys, tmp_path):
    job = tmp_path / "job.sbatch"
    job.write_text(filled(capsys, name, "--nodes", "3", "train.py", "--epochs", "3"))
    for script in (FOLDER / f"{name}.sbatch", job):
        result = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_filled_template_differs_in_what_was_asked_for_alone(name, capsys):
    before = (FOLDER / f"{name}.sbatch").read_text().splitlines()
    after = filled(capsys, name, "--nodes", "7", "--qos=high", "train.py", "--epochs", "3").splitlines()
    new = [line for line in after if line not in before]
    python = [] if name == "apptainer" else [f"HPCDIST_PYTHON={sys.executable}"]
    assert new == ["#SBATCH --nodes=7", "#SBATCH --qos=high", *python, 'set -- train.py --epochs 3 "$@"']


def test_lines_of_the_site_are_set_by_options_of_their_name(capsys):
    script = filled(capsys, "cpu", "--mpi", "pmi2", "--python", "/a path/python", "--modules", "mpich/4.2 x", "t.py")
    assert "\nHPCDIST_MPI=pmi2\nHPCDIST_MPI" not in script
    assert "HPCDIST_MODULES='mpich/4.2 x'\nHPCDIST_PYTHON='/a path/python'\nHPCDIST_MPI=pmi2\n" in script


def test_options_after_the_script_belong_to_the_script(capsys):
    script = filled(capsys, "cpu", "train.py", "--nodes", "9", "--output", "x", "--help")
    assert "#SBATCH --nodes=2" in script
    assert 'set -- train.py --nodes 9 --output x --help "$@"' in script


def test_arguments_survive_the_shell(capsys):
    arguments = ["a b", "$HOME", "`id`", "*", "it's", 'say "x"', "", "back\\slash", "two\nlines"]
    script = filled(capsys, "cpu", "train.py", *arguments)
    head = script[: script.index("[[ $#")] + 'printf "%s\\0" "$@"\n'
    output = subprocess.run(["bash", "-c", head, "bash", "more"], capture_output=True, text=True, check=True).stdout
    assert output.split("\0")[:-1] == ["train.py", *arguments, "more"]


@pytest.mark.parametrize("value", ["1 2", "1#2", "'1'"])
def test_a_value_that_sbatch_would_cut_is_quoted(value, capsys):
    assert f'#SBATCH --job-name="{value}"' in filled(capsys, "cpu", "--job-name", value, "train.py")


@pytest.mark.parametrize("value", ["", "1\t2", "x\n#SBATCH --exclusive", '"1"', "1\\2"])
def test_a_value_that_would_break_its_line_is_refused(value, capsys):
    assert submit.run(["--partition", value, "train.py"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert f"--partition {value!r} cannot be written to a job script" in seen.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script to run"),
        (["--template", "mpi", "train.py"], "no template 'mpi' (known: apptainer, array, cpu, "),
        (["--nodes"], "--nodes has no value"),
        (["-z", "3", "train.py"], "unknown option -z (sbatch's letters: A, "),
        (["--exclusive"], "no script to run"),
    ],
)
def test_a_wrong_call_says_what_is_known(arguments, message, capsys):
    assert submit.run(arguments) == 2
    assert message in capsys.readouterr().err


def directives(script):
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_options_of_sbatch_pass_through_in_every_form(capsys):
    given = ["-N4", "-p", "long", "--exclusive", "--nice=7", "-H", "--array", "0-7%2", "--constraint=a&b", "-n", "8"]
    given += ["--output", "here-%j.out"]
    found = directives(filled(capsys, "cpu", *given, "--", "train.py"))
    assert {"nodes=4", "partition=long", "exclusive", "nice=7", "hold", "array=0-7%2", "constraint=a&b"} < {*found}
    assert "output=here-%j.out" in found
    assert len({line.partition("=")[0] for line in found}) == len(found)


@pytest.mark.parametrize(
    ("given", "expected", "ranks"),
    [
        (["--gpus-per-node", "4"], "gpus-per-node=4", "ntasks-per-node=4"),
        (["--gres=gpu:a100:3"], "gres=gpu:a100:3", "ntasks-per-node=3"),
        (["--gres", "gpu:4", "--ntasks-per-node", "2"], "gres=gpu:4", "ntasks-per-node=2"),
        (["-G", "8", "-n", "8"], "gpus=8", "ntasks=8"),
        (["--gres", "lustre:1"], "gres=lustre:1", "ntasks-per-node=4"),
    ],
)
def test_an_option_that_asks_for_gpus_chooses_the_template_and_its_ranks(given, expected, ranks, capsys):
    assert submit.run([*given, "--dry-run", "train.py"]) == 0
    found = directives(capsys.readouterr().out)
    assert expected in found
    assert [line for line in found if line.startswith("ntasks")] == [ranks]
    assert [line for line in found if line.startswith(("gpus", "gres"))] == [expected]
    assert ("job-name=gpu" in found) is ("lustre" not in expected)


@pytest.mark.parametrize(
    ("given", "gone"),
    [(["--cpus-per-gpu=4"], "cpus-per-task"), (["--gpus=2", "--ntasks-per-gpu=1"], "ntasks-per-node")],
)
def test_what_sbatch_refuses_beside_an_option_is_left_out(given, gone, capsys):
    found = directives(filled(capsys, "requeue", *given, "train.py"))
    assert {each.lstrip("-") for each in given} < set(found)
    assert not [line for line in found if line.startswith(gone)]


def test_help_lists_the_templates_and_the_settings_of_one(capsys):
    listed = filled(capsys, "cpu", "--help")
    assert all(f"\n  {name} " in listed for name in NAMES)
    assert "--max-restarts" in filled(capsys, "requeue", "-h")
    assert "--max-restarts" not in listed


def test_submitting_without_sbatch_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.run(["train.py"]) == 1
    assert "no sbatch on the PATH" in capsys.readouterr().err
