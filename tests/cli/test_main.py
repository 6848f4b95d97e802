"""The table of commands: each runs, none is missing, wrong calls exit with 2."""

import contextlib
import pkgutil
import re
import signal
import sys

import pytest

import hpcdist
from hpcdist import cli
from hpcdist.cli import main as cli_main
from tests import programs


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_a_listed_command_can_be_run(name):
    assert callable(cli_main.module_of(name).run)
    assert re.search(rf"^  {name} +{cli_main.COMMANDS[name]}$", cli_main.usage(), re.MULTILINE)


def test_every_module_of_the_folder_is_listed():
    # a module with an underscore in its name, such as job_arguments, is no command
    there = {module.name for module in pkgutil.iter_modules(cli.__path__) if "_" not in module.name} - {"main"}
    assert there == {*cli_main.COMMANDS}


def test_help_and_version(capsys):
    assert cli_main.main(["--help"]) == 0
    assert "commands:" in capsys.readouterr().out
    assert cli_main.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"hpcdist {hpcdist.__version__}"


def test_a_closed_stdout_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli_main.main(["explain"]) == 0


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcdist.cli.explain.run", interrupted)
    assert cli_main.main(["explain"]) == 128 + signal.SIGINT


@pytest.mark.parametrize("args", [[], ["docter"]])
def test_a_wrong_call_is_2_and_names_the_commands(args, capsys):
    assert cli_main.main(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "doctor" in shown.err
    if args:
        assert "no command 'docter' (known: " in shown.err


@pytest.mark.parametrize(
    "command", [[], *([name] for name in cli_main.COMMANDS), ["submit", "--template", "elastic"], ["bench", "ddp"]]
)
def test_help_fits_the_terminal_without_marks(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli_main.main([*command, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert ("``" in shown, "The command" in shown, "Subject " in shown) == (False, False, False)


def test_the_package_runs_as_a_module():
    done = programs.run([sys.executable, "-m", "hpcdist", "submit", "--help"])
    assert done.returncode == 0, done.stderr
    assert "templates:" in done.stdout


@pytest.mark.parametrize("command", ["explain", "--help"])
def test_a_reader_that_leaves_ends_a_command_in_silence(command):
    line = f"set -o pipefail; {sys.executable} -m hpcdist {command} | true"  # which reads nothing
    done = programs.run(["bash", "-c", line])
    assert (done.returncode, done.stderr) in [(128 + signal.SIGPIPE, ""), (0, "")]


def test_a_full_disk_is_said_in_a_line():
    done = programs.run(["bash", "-c", f"{sys.executable} -m hpcdist explain > /dev/full"])
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_connection_that_a_script_has_lost_is_the_scripts_error(tmp_path):
    """``run`` ended in silence, as if a reader of its output had left."""
    (tmp_path / "train.py").write_text("raise BrokenPipeError(32, 'a data loader')\n")
    done = programs.run([sys.executable, "-m", "hpcdist", "run", tmp_path / "train.py"])
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, ["BrokenPipeError: [Errno 32] a data loader"])


@pytest.mark.parametrize(
    "args", [["docter"], ["--help"], ["bench", "--sizes", "4,5"], ["bench", "--help"], ["doctor", "-h"], ["run"]]
)
def test_a_job_says_once_what_is_wrong_with_its_arguments(args, capsys, monkeypatch):
    statuses = []
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("PMI_RANK", rank)
        try:
            statuses.append(cli_main.main(args))
        except SystemExit as ended:
            statuses.append(ended.code)
        shown = capsys.readouterr()
        assert bool(shown.out + shown.err) == (rank == "0")
    assert statuses[0] == statuses[1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_the_marks_is_no_error(encoding):
    done = programs.run([sys.executable, "-m", "hpcdist", "explain", "lost-rank"], PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout[:25]) == (0, "lost-rank\n    ? on rank ?"), done.stderr
    out = programs.run(
        [sys.executable, "-m", "hpcdist", "submit", "--dry-run", "été.py"], PYTHONIOENCODING=encoding
    ).stdout
    assert "\nset -- 'été.py' " in out  # a job script is as it was given


@pytest.mark.parametrize(
    "args", [["--rounds", "0"], ["--seconds", "0"], ["--factor", "1"], ["--sides", "mpi"], ["--rounds", "two"]]
)
def test_numbers_with_which_nothing_could_be_timed_are_refused(args, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli_main.main(["bench", *args])
    assert f"argument {args[0]}" in capsys.readouterr().err


WITHOUT_TORCH = """
import contextlib, io, sys
from hpcdist.cli.main import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(line.split())
    assert not {"torch", "numpy", "mpi4py"} & sys.modules.keys(), line
print("none")
"""


def test_commands_that_need_no_torch_do_not_import_it():
    lines = [
        *("--help", "--version", "explain", "explain forked-child", "debug --help"),
        *("debug 4711", "debug --pid 1", "submit --help", "submit --dry-run train.py"),
    ]
    done = programs.run([sys.executable, "-c", WITHOUT_TORCH, *lines])
    assert (done.stdout, done.returncode) == ("none\n", 0), done.stderr


NAMES = """
import sys
import hpcdist
assert hpcdist.__version__ and "torch" not in sys.modules
{first}
import torch.distributed, torch.distributed.debug
assert torch.distributed.Backend.HPCDIST == "hpcdist"
assert "hpcdist" in torch.distributed.debug.start_debug_server.__code__.co_filename
names = {{}}
exec("from hpcdist import *", names)
assert names["all_reduce"] is hpcdist.all_reduce and hpcdist.all_reduce._torchdynamo_disable
assert set(hpcdist.__all__) <= set(dir(hpcdist)) and "_find_and_load" not in dir(hpcdist)
import pickle
assert pickle.loads(pickle.dumps(hpcdist.Window)) is hpcdist.Window
try:
    hpcdist.nonsense
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "first",
    [
        "import torch; assert 'all_reduce' in vars(hpcdist)",
        "hpcdist.all_reduce",
        "import hpcdist.c10d.collectives; assert 'hpcdist.c10d.torch_init' in sys.modules",
        "import hpcdist.core.errors; hpcdist.Window",
        "import hpcdist_stores; assert hpcdist.TCPStore is hpcdist_stores.TCPStore",
        "assert 'Window' in dir(hpcdist)",
        "from hpcdist import dist2; dist2.new_group",
    ],
)
def test_the_public_names_come_with_torch_or_with_their_first_use(first):
    autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = programs.run([sys.executable, "-c", NAMES.format(first=first)], **autoload)
    assert done.stdout == "module 'hpcdist' has no attribute 'nonsense'\n", done.stderr


ADDED = """
import gc, sys
import torch
before, searches = {*sys.modules}, []
gc.callbacks.append(lambda phase, about: searches.append(about["generation"]))
import hpcdist
hpcdist.all_reduce
assert gc.isenabled() and 2 not in searches, searches
print(*sorted({name.split(".")[0] for name in sys.modules.keys() - before}))
"""
NEEDED = {"hpcdist", "hpcdist_stores", "torch", "hostlist", "hmac", "ipaddress", "secrets", "termios"}


def test_hpcdist_adds_few_modules_to_torch():
    """The standard library's statistics took longer than all of hpcdist, and a search for garbage as long again."""
    done = programs.run([sys.executable, "-c", ADDED])
    assert set(done.stdout.split()) <= NEEDED, done.stdout
    assert done.returncode == 0, done.stderr
