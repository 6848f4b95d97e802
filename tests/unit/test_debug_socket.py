"""The socket by which ``debug`` finds a rank, and the folder of its traces: other users get and put nothing there."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpcdist.cli import debug, running_job
from hpcdist.core.printing import printable
from hpcdist.watch import debug_socket
from hpcdist.watch.channel import Channel
from hpcdist.watch.debug_socket import DebugSocket, JobRank, ranks_on_this_machine
from hpcdist.watch.recorder import Recorder
from hpcdist.watch.watchdog import Watchdog

JOB = "a job"
INPUTS = int(os.environ.get("HPCDIST_TEST_FUZZ", "300"))
as_another = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
IMPOSTOR = """
import os, socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(f"\\0{sys.argv[2]}0-1")
made.listen(8)
strange = socket.socket(socket.AF_UNIX)
strange.bind(b"\\0" + sys.argv[2].encode() + b"0-\\xff\\n[")
print(flush=True)
while True:
    try:
        made.accept()[0].send(sys.argv[1].encode())
    except BrokenPipeError:
        pass
"""


def said(channel: Channel, job: str = JOB) -> JobRank:
    return JobRank(channel.own, 0, job, "p", "")


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' jobs may run beside these, and in this process: its watchdog has its name until it ends."""
    monkeypatch.setattr(debug_socket, "PREFIX", f"{debug_socket.PREFIX}{os.getpid()}-")


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel(0)
    yield made
    made.close()


@pytest.fixture
def served(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Iterator[DebugSocket]:
    """A rank's socket, which a thread answers."""
    monkeypatch.setattr(debug_socket, "CLIENT_SECONDS", 30.0)  # the thread may be late on a busy machine
    made, ends = DebugSocket(), threading.Event()

    def answers() -> None:
        while not ends.wait(0.001):
            made.answer(said(channel))

    thread = threading.Thread(target=answers)
    thread.start()
    yield made
    assert thread.is_alive()
    ends.set()
    thread.join()
    made.close()


def test_whatever_is_written_to_the_socket_the_next_client_is_answered(
    served: DebugSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_socket, "CLIENT_SECONDS", 5.0)  # on a busy machine too
    made, name = random.Random(3), served.sockets[0].getsockname()
    for number in range(INPUTS):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            if number % 3:
                try:
                    client.send(made.randbytes(made.randrange(1, 500)))
                except BrokenPipeError:  # it has answered already
                    continue
    assert len(ranks_on_this_machine()) == 1


@as_another
def test_a_socket_of_another_user_is_not_believed(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/usr/bin/env", "python3", "-c", IMPOSTOR, json.dumps(said(channel, job="a trap")), debug_socket.PREFIX]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=65534) as impostor:
        assert impostor.stdout is not None
        impostor.stdout.readline()
        try:
            assert "a trap" not in [each.job for each in ranks_on_this_machine()]
            monkeypatch.setattr(debug_socket, "is_same_user", lambda connection: True)
            assert "a trap" in [each.job for each in ranks_on_this_machine()]  # the check it is that keeps it out
        finally:
            impostor.kill()


@as_another
def test_another_user_gets_no_answer(served: DebugSocket) -> None:
    client = "import socket, sys; to = socket.socket(socket.AF_UNIX); to.connect(sys.argv[1]); print(to.recv(65536))"
    name = "\0" + served.sockets[0].getsockname()[1:].decode()
    command = ["/usr/bin/env", "python3", "-c", client.replace("sys.argv[1]", repr(name))]
    assert subprocess.run(command, user=65534, capture_output=True, text=True, timeout=60).stdout == "b''\n"
    assert len(ranks_on_this_machine()) == 1


PARTIAL = json.dumps([[["10.0.0.1"], 1], 0, JOB]).encode()


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Let a thread answer one client of the socket that a rank would have."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{debug_socket.PREFIX}{os.getuid()}-{os.getpid()}")
        listening.listen()

        def answers() -> None:
            client, _ = listening.accept()
            with client, suppress(OSError):
                answer(client)

        thread = threading.Thread(target=answers)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"", b"[" * 50_000, b"{}", PARTIAL, b"[[]]", b"1", b"\xff", b"9" * 70_000], ids=range(8)
)
def test_an_answer_without_sense_is_left_out(answer: bytes) -> None:
    with answering(lambda client: client.sendall(answer)):
        assert ranks_on_this_machine() == []


def test_an_answer_without_end_is_not_read_on() -> None:
    sent: list[int] = []

    def send_on(client: socket.socket) -> None:
        while len(sent) < 100:
            client.sendall(b"9" * 1_000_000)
            sent.append(1)

    with answering(send_on):
        assert ranks_on_this_machine() == []
    assert len(sent) < 10


def test_what_is_printed_commands_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printable("a\x1b[2J\x9b1m\u202e\x07 ü\n\tb") == "a\\x1b[2J\\x9b1m\\u202e\\x07 ü\n\tb"
    picture = running_job.Picture(
        "\x1b]0;title\x07", [("0", "host\x1b[2J", "", "f\x1b (g)")], [], [], {0: ["\x1b"]}, [0]
    )
    assert "\x1b" not in running_job.as_text(picture, True)

    def find(pid: int | None) -> None:
        raise ConnectionError("a\x1b[2Jb")

    monkeypatch.setattr(running_job, "find", find)
    assert debug.run([]) == 1
    Watchdog.say(cast("Watchdog", SimpleNamespace(rank=0)), "c\x1b[2J")
    printed = capfd.readouterr().err
    assert "a\\x1b[2Jb" in printed
    assert "c\\x1b[2J" in printed
    assert "\x1b" not in printed


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Recorder("name")


def test_a_trace_is_the_users_own(recorder: Recorder) -> None:
    mask = os.umask(0)
    try:
        paths = [Path(recorder.dump(0)), Path(recorder.dump(0)), Path(recorder.dump(1))]
    finally:
        os.umask(mask)
    assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
    assert sorted(each.name for each in paths[0].parent.iterdir()) == ["rank_0", "rank_1"]
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in paths)


def test_nothing_is_written_to_a_folder_that_others_have_put_there(recorder: Recorder, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "hpcdist_trace_name", tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    ways = {"link": lambda: folder.symlink_to(elsewhere), "open": lambda: folder.mkdir(), "file": folder.touch}
    if os.getuid() == 0:
        ways["another's"] = lambda: (folder.mkdir(0o700), os.chown(folder, 65534, 65534))
    for way, make in ways.items():
        make()
        if way == "open":
            folder.chmod(0o777)
        with pytest.raises(PermissionError, match="not a folder of this user's own"):
            recorder.dump(0)
        assert not list(elsewhere.iterdir())
        folder.rmdir() if folder.is_dir() and not folder.is_symlink() else folder.unlink()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    folder.mkdir(0o700)
    (folder / "rank_0").symlink_to(victim)
    recorder.dump(0)
    assert victim.read_text() == "kept"
