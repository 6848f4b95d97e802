"""Shell completion: what real shells offer, by the script that the command prints."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from hpcdist.cli import completion
from hpcdist.cli.main import COMMANDS

# what is typed -> what is offered; nothing means files
OFFERED = {
    "": [*COMMANDS, "--help", "--version"],
    "de": ["demo", "debug"],
    "bench p": ["p2p"],
    "bench --js": ["--json"],
    "bench --device ": ["cpu", "cuda"],
    "bench --json ": [],
    "explain lost": ["lost-rank"],
    "submit --template re": ["requeue"],
    "submit --dry": ["--dry-run"],
    "run tr": [],
}
ASK = """
source "$0"
ask() {
  [ -z "${ZSH_VERSION:-}" ] || emulate -L sh  # as zsh does when it completes
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
  _hpcdist
  echo "${COMPREPLY[*]}"
}
"""


def typed(line: str) -> list[str]:
    return ["hpcdist", *line.split(), *([""] if line[-1:] in ("", " ") else [])]


def output(shell: str, *arguments: object) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def script(request, tmp_path, capsys):
    assert completion.run([request.param]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.mark.parametrize(("shell", "script"), [("bash", "bash"), ("zsh", "zsh")], indirect=["script"])
def test_bash_and_zsh_complete_the_words(shell, script):
    lines = "\n".join(f"ask {' '.join(repr(each) for each in typed(line))}" for line in OFFERED)
    options = ["--norc"] if shell == "bash" else ["-f"]
    found = [line.split() for line in output(shell, *options, "-c", ASK + lines, script)]
    if shell == "zsh":  # which itself leaves out what does not begin with the word
        begun = [typed(line)[-1] for line in OFFERED]
        found = [[each for each in words if each.startswith(word)] for word, words in zip(begun, found, strict=True)]
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_the_words(script):
    asked = {line: expected for line, expected in OFFERED.items() if line and expected}
    for line, expected in asked.items():
        found = output("fish", "--no-config", "-c", f"source {script}; complete -C 'hpcdist {line}'")
        assert sorted(each.split("\t")[0] for each in found) == sorted(expected), line
