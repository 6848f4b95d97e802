"""``python -m hpcdist debug`` on a running job of three ranks, one of which goes to sleep."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcdist.cli import debug, running_job
from tests import programs

pytestmark = [
    pytest.mark.xdist_group("debug"),  # the tests share a job
    pytest.mark.timeout(180),
    pytest.mark.skipif(programs.LIBRARY == "none", reason="no mpirun"),
]
SECRET = "5ec2e7"
PROGRAM = """
import os, time
import torch
import hpcdist as dist

def works():
    goes_on = torch.ones(1)
    while goes_on:
        goes_on.fill_(not os.path.exists("sleep"))
        dist.broadcast(goes_on, 0)
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)

def sleeps():
    while not os.path.exists("wake"):
        time.sleep(0.05)

dist.init_process_group()
if dist.get_rank() == 0:
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
works()
if dist.get_rank() == 1:
    sleeps()
dist.all_reduce(torch.ones(5))
dist.destroy_process_group()
"""


def until(asked, seconds=60):
    """Return the first true answer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := asked():
            return answer
        time.sleep(0.1)
    raise AssertionError("it did not come to that in time")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(PROGRAM)
    process = programs.start(programs.mpirun_command(3, ["job.py"]), folder, HPCDIST_DEBUG_SECRET=SECRET)
    pid = int(until(lambda: (folder / "pid").exists() and (folder / "pid").read_text()))
    yield folder, pid, process
    (folder / "sleep").touch()
    (folder / "wake").touch()
    programs.output(process, 30)


@pytest.fixture
def job(running):
    return running_job.find(running[1])


def test_the_job_is_found_with_all_its_ranks(job):
    assert job.program == "job.py"
    assert sorted(job.channel.endpoints) == [0, 1, 2]


def test_calls_are_counted_and_timed_while_somebody_looks(job):
    def timed():
        return [row for row in running_job.look(job).calls if row[0] == "all_reduce"]

    row = until(timed)[0]
    assert row[-1] == "job.py:11 (works)"
    assert int(row[1]) >= 1
    assert float(row[4]) > 0
    assert row[2] == running_job.format_size(4000 * int(row[1]))
    picture = running_job.look(job)
    assert picture.late == []
    assert [row[:2] for row in picture.groups] == [("group '0'", "mpi")]
    assert until(lambda: int(timed()[0][1]) > int(row[1]))


def test_an_address_and_the_jobs_secret_do_too(job, monkeypatch, capsys):
    address = f"127.0.0.1:{job.channel.endpoints[0].port}"
    monkeypatch.setenv("HPCDIST_DEBUG_SECRET", SECRET)
    assert sorted(running_job.at(address).channel.endpoints) == [0, 1, 2]
    monkeypatch.setenv("HPCDIST_DEBUG_SECRET", "another")
    assert debug.run([address, "--once"]) == 1
    assert "another HPCDIST_DEBUG_SECRET" in capsys.readouterr().err
    monkeypatch.delenv("HPCDIST_DEBUG_SECRET")
    with pytest.raises(ConnectionError, match="set HPCDIST_DEBUG_SECRET"):
        running_job.at(address)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_told_nothing(running):
    name = f"\\0hpcdist-0-{running[1]}"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{name}'); print(s.recv(100))"
    said = subprocess.run(
        ["/usr/bin/env", "python3", "-c", code], user=65534, capture_output=True, text=True, timeout=60
    )
    assert said.stdout == "b''\n", said.stderr


def test_a_rank_that_sleeps_is_late_and_its_stack_is_shown(running, job, tmp_path, capsys):
    (running[0] / "sleep").touch()

    def waited_for():
        picture = running_job.look(job)
        return picture if picture.late else None

    picture = until(waited_for)
    assert picture.late == [1]
    assert [row[2] for row in picture.ranks] == ["", "LATE", ""]
    assert "in all_reduce #" in picture.ranks[0][3]
    assert "not in a call of hpcdist, at job.py:" in picture.ranks[1][3]
    assert "(sleeps)" in picture.stacks[1][0]
    assert picture.groups[0][-1] == "rank 1"
    page = tmp_path / "page.html"
    assert debug.run(["--pid", str(running[1]), "--html", str(page), "--seconds", "0.1"]) == 0
    assert "<td><span class=late>1</span>" in page.read_text()
    assert "prefers-color-scheme: dark" in page.read_text()
    assert debug.run(["--pid", str(running[1]), "--once", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "stack of rank 1:" in shown
    assert "stack of rank 0:" not in shown


def test_the_page_is_served_to_those_who_know_its_path(job, capsys):
    threading.Thread(target=running_job.serve, args=(job, 0, 1.0), daemon=True).start()
    url = until(lambda: capsys.readouterr().out.strip())
    page = urllib.request.urlopen(url, timeout=30).read().decode()
    assert "job.py, 3 ranks" in page
    assert 'http-equiv="refresh" content="1"' in page
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}x", timeout=30)


def test_a_page_that_cannot_be_written_is_1(running, capsys):
    assert debug.run(["--pid", str(running[1]), "--html", "/absent/page.html", "--seconds", "0.1"]) == 1
    assert "error: [Errno 2] No such file or directory: '/absent/page.html'" in capsys.readouterr().err


def test_the_job_ends_as_if_nobody_had_looked_and_the_look_at_it_too(running):
    with ThreadPoolExecutor() as pool:
        looks = pool.submit(debug.run, ["--pid", str(running[1]), "--seconds", "0.1"])
        time.sleep(1)
        assert not looks.done()
        (running[0] / "sleep").touch()
        (running[0] / "wake").touch()
        output = programs.output(running[2], 60)
        assert running[2].returncode == 0, output
        assert looks.result(20) == 0


def test_no_job_and_wrong_arguments(capsys):
    assert debug.run(["--pid", "1"]) == 1
    assert "no job of yours" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        debug.run(["nonsense"])
    assert "expected a Slurm job's number or HOST:PORT" in capsys.readouterr().err


def test_a_number_is_a_slurm_job(capsys, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert debug.run(["4711"]) == 1
    assert "no srun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--seconds", "7", "--once", "7"], ["--once", "--seconds=7.0"]),
        (["7", "--stacks", "--pid", "7", "--serve=0"], ["--pid=7", "--stacks", "--seconds=2.0", "--serve=0"]),
    ],
)
def test_the_other_options_go_to_the_jobs_node(given, expected, monkeypatch):
    started = []
    monkeypatch.setattr(debug, "run_there", started.extend)
    debug.run(given)
    assert started[started.index("debug") + 1 :] == expected
    assert "--jobid=7" in started


@pytest.mark.parametrize(("given", "number"), [("7_1", "12"), ("7_2", "7_2"), ("7.0", "7")])
def test_a_task_of_an_array_has_a_number_of_its_own(given, number, tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text('#!/bin/sh\n[ "$2" = --jobs=7_1 ] && echo 12\n')
    (tmp_path / "squeue").chmod(0o755)
    started = []
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(debug, "run_there", started.extend)
    debug.run([given])
    assert f"--jobid={number}" in started


def test_ctrl_c_ends_the_srun_of_a_job_elsewhere(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(
        f"#!/bin/sh\ntrap 'echo > {tmp_path}/ended; kill $!; exit 1' TERM\nsleep 0.5; echo begun\nsleep 30 & wait\n"
    )
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code = (  # a shell starts what runs in its background with SIGINT ignored
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hpcdist.cli.main import main; sys.exit(main(['debug', '4711']))"
    )
    process = programs.start([sys.executable, "-c", code], PATH=path)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, said = programs.output(process, 20)
    assert (process.returncode, said, (tmp_path / "ended").exists()) == (0, "", True)


@pytest.mark.parametrize(
    "given",
    [
        ["foo"],
        ["host:99999"],
        [":1"],
        ["--serve", "65536"],
        ["--serve", "-1"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
    ],
)
def test_a_wrong_argument_is_2_before_anything_is_looked_for(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        debug.run(given)
    assert repr(given[-1]) in capsys.readouterr().err
