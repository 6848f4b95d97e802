"""Thresholds of node-shared memory: the setting, the table, and the file that takes its place."""

import os
from pathlib import Path

import pytest
import torch

from hpcdist.backends.mpi.node import threshold_file, thresholds
from hpcdist.backends.mpi.node.threshold_file import FLAT, NEVER, SEVERAL
from hpcdist.backends.mpi.node.thresholds import Thresholds
from hpcdist.cli import tune
from hpcdist.launch import topology
from tests.forked import python
from tests.programs import run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(threshold_file.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    return tmp_path


def test_override():
    known = {"0": 1, "64K": 65536, "4M": 4 << 20, "off": NEVER, "OFF": NEVER, "": None, "a.json": None}
    assert {text: thresholds.override(text) for text in known} == known
    with pytest.raises(ValueError, match="number of bytes such as 65536"):
        Thresholds("lots")


def test_a_file_stands_in_for_the_table(home):
    path = home / "measured.json"
    everything = dict.fromkeys(thresholds.COLLECTIVES, 1 << 14)
    threshold_file.write(path, "Some MPI", 2, everything)
    threshold_file.write(path, "Some MPI", 8, dict.fromkeys(thresholds.COLLECTIVES, NEVER))
    threshold_file.write(path, "Some MPI", SEVERAL, {"all_reduce": 1 << 13})
    threshold_file.write(path, "Some MPI", FLAT, {"all_reduce of half types": 1 << 12})
    measured = Thresholds("", str(path), threshold_file.measured(threshold_file.read(path), topology.processor()))

    def of(name, dtype=torch.float32, op="SUM", nodes=1, ranks_per_node=0, ranks=2, library="Some MPI"):
        return measured.of(name, dtype, op, nodes, ranks_per_node, ranks, library)

    for ranks, at in ((2, 1 << 14), (3, 1 << 14), (5, NEVER), (64, NEVER)):
        assert of("all_reduce", ranks=ranks) == at
    assert of("all_reduce", nodes=2, ranks_per_node=2, ranks=4) == 1 << 13
    assert of("broadcast", op=None, nodes=2, ranks_per_node=2, ranks=4) == NEVER
    assert of("all_reduce", nodes=2, ranks_per_node=0, ranks=3) == NEVER
    assert of("all_reduce", torch.bfloat16) == thresholds.HALF_ROWS["all_reduce of half types"]  # not in the file
    assert of("all_reduce", op="MAX") == of("all_reduce", torch.bfloat16)  # MPI gets a copy of floats, because of NaN
    assert of("all_reduce", torch.int32, op="MAX") == of("all_reduce")
    row = "reduce_scatter_single"
    assert of(row, library="Open MPI") == thresholds.BYTES["Open MPI", 2][row]
    assert of("all_reduce", op="PREMUL_SUM") == NEVER
    assert of("all_reduce", ranks=1) == NEVER


def test_the_first_file_that_knows_the_processor_is_found(home, monkeypatch):
    user, environment = threshold_file.installed_files()[:2]
    assert threshold_file.find()[1:] == ("", {})
    threshold_file.write(environment, "Some MPI", 2, {"broadcast": 5})
    assert threshold_file.find() == ("", str(environment), {("Some MPI", 2): {"broadcast": 5}})
    threshold_file.write(user, "Some MPI", 2, {"broadcast": NEVER})
    assert threshold_file.find() == ("", str(user), {("Some MPI", 2): {"broadcast": NEVER}})
    user.write_text(user.read_text().replace(topology.processor(), "of another node"))
    assert threshold_file.find()[1] == str(environment)
    monkeypatch.setenv(threshold_file.VARIABLE, "64K")
    assert threshold_file.find() == ("64K", "", {})
    monkeypatch.setenv(threshold_file.VARIABLE, str(user))
    assert threshold_file.find() == (str(user), "", {})
    threshold_file.write(home / "x.json", "Some MPI", 2, {"broadcast": 5})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv(threshold_file.VARIABLE, "~/x.json")  # as `env` and sbatch's --export hand it on
    assert threshold_file.find() == ("~/x.json", str(home / "x.json"), {("Some MPI", 2): {"broadcast": 5}})
    assert tune.parser().parse_args(["--output=~/x.json"]).output == home / "x.json"


def test_a_write_that_fails_leaves_the_file_as_it_was(home, monkeypatch):
    path = home / "link.json"
    path.symlink_to("measured.json")
    threshold_file.write(path, "Some MPI", 2, {"broadcast": 5})
    before, write_text = path.read_text(), Path.write_text

    def full(self, text, **options):
        write_text(self, text[:9], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        threshold_file.write(path, "Some MPI", 2, {"broadcast": 6})
    assert path.read_text() == before
    assert path.is_symlink()
    assert sorted(each.name for each in home.iterdir()) == ["link.json", "measured.json"]


def test_tune_finds_a_folder_that_it_cannot_write_to_before_it_measures(home):
    assert tune.make_folder(home / "new" / "measured.json") == ""
    assert [*(home / "new").iterdir()] == []
    assert tune.make_folder(Path("/proc/measured.json")) != ""


def test_a_user_without_a_home_has_no_file(home, monkeypatch):
    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)  # as in a container that runs as any user
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert threshold_file.find() == ("", "", {})
    with pytest.raises(SystemExit, match="2"):
        tune.run([])


def test_a_folder_that_cannot_be_looked_into_has_no_file(home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", f"/{'x' * 300}")  # too long; another user's is such a one if not to root
    assert threshold_file.find() == ("", "", {})


ROW = '{{"Xeon": {{"Some MPI": {{"{}": {{"all_reduce": {}}}}}}}}}'


@pytest.mark.parametrize(
    "content",
    [
        *("not JSON", "[]", "[" * 100_000, '{"Xeon": {"Some MPI": {"two": {}}}}', None),
        *(ROW.format(*each) for each in [("0", 5), ("-2", 5), ("2", 0), ("2", -5), ("2", "Infinity"), ("2", "NaN")]),
    ],
    ids=lambda content: content and content[:60],
)
def test_an_unreadable_file_is_an_error(home, monkeypatch, content):
    path = home / "wrong.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(threshold_file.VARIABLE, str(path))
    error = threshold_file.find()
    assert isinstance(error, ValueError)
    assert "expected the file that `python -m hpcdist tune` wrote" in str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("has_home", [False, True], ids=["no home", "a home that is another user's"])
def test_a_user_without_a_home_has_no_file_there(tmp_path, has_home):
    """As in a container: rank 0 looks for it, and the others would wait for what it says."""
    program = (
        "import os\n"
        "from hpcdist.backends.mpi.node import threshold_file\n"
        "os.setuid(54321)\n"
        "assert threshold_file.find() == ('', '', {}), threshold_file.find()\n"
    )
    tmp_path.chmod(0o700)  # pytest's folders are closed to others
    home = [f"HOME={tmp_path}"] if has_home else ["-u", "HOME"]
    done = run(["env", "-u", "XDG_CONFIG_HOME", *home, *python(), "-c", program])
    assert done.returncode == 0, done.stderr


def test_the_processor_is_named_by_its_first_core(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Some CPU 7 : a\n\nprocessor : 1\nmodel name : other\n")
    assert topology.processor(info) == "Some CPU 7 : a"
    info.write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n\n")
    assert topology.processor(info).endswith(" 0x41 0xd40")
    assert topology.processor(tmp_path / "absent")
