"""The secret of slurm://: the user's own, made once by whichever rank is first, refused if others can have it."""

import os
import shutil
import subprocess
import threading
import time
from datetime import timedelta

import pytest

import hpcdist
from hpcdist.launch import rendezvous, slurm_secret
from tests.ports import free_port

HOSTS = ["n1", "n2"]
LIMIT = timedelta(seconds=20)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(slurm_secret.VARIABLE, raising=False)
    return tmp_path


def test_ranks_that_start_together_have_one_key(home):
    found = []
    threads = [threading.Thread(target=lambda: found.append(slurm_secret.key_of(["n1"]))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert len(found[0]) == slurm_secret.LENGTH
    file = home / slurm_secret.FILE
    assert os.listdir(file.parent) == [file.name]  # no drafts
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    mine = slurm_secret.secret("77.0.0", found[0])
    assert mine not in (slurm_secret.secret("77.1.0", found[0]), slurm_secret.secret("77.0.0", bytes(len(found[0]))))


def test_a_key_that_others_could_have_is_refused(home, monkeypatch):
    slurm_secret.key_of(["n1"])
    file = home / slurm_secret.FILE
    for change in (lambda: file.chmod(0o640), lambda: file.write_bytes(b"short"), lambda: file.parent.chmod(0o777)):
        file.parent.chmod(0o700)
        shutil.rmtree(file.parent)
        slurm_secret.key_of(["n1"])
        change()
        with pytest.raises(hpcdist.DistBackendError, match=r"cannot use .*store-key"):
            slurm_secret.key_of(["n1"])
    shutil.rmtree(file.parent)
    slurm_secret.key_of(["n1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)  # as if another user had made it
        with pytest.raises(hpcdist.DistBackendError, match=r"belongs to user"):
            slurm_secret.key_of(["n1"])
    elsewhere = home / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(hpcdist.DistBackendError, match=r"symbolic links"):
        slurm_secret.key_of(["n1"])
    file.unlink()
    elsewhere.rename(file)
    assert len(slurm_secret.key_of(["n1"])) == slurm_secret.LENGTH
    file.parent.rename(elsewhere)
    file.parent.symlink_to(elsewhere)
    with pytest.raises(hpcdist.DistBackendError, match=r"mode 777"):
        slurm_secret.key_of(["n1"])
    file.parent.unlink()
    elsewhere.rename(file.parent)
    file.unlink()
    os.mkfifo(file, 0o600)  # each reader would get another key
    with pytest.raises(hpcdist.DistBackendError, match=r"not a regular file"):  # nobody writes to it
        slurm_secret.key_of(["n1"])
    with open(os.open(file, os.O_RDWR), "wb", buffering=0) as writer:
        writer.write(bytes(slurm_secret.LENGTH))
        with pytest.raises(hpcdist.DistBackendError, match=r"not a regular file"):
            slurm_secret.key_of(["n1"])


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to be another user")
def test_another_user_reads_neither_the_key_nor_the_store(home, monkeypatch):
    for folder in (home, *list(home.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o755)
    key = slurm_secret.key_of(["n1"])
    store = rendezvous.serve_any("127.0.0.1", [free_port()], LIMIT, slurm_secret.secret("77.0.0", key))
    store.set("key", "of the job")
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    read = subprocess.run([*other, "cat", home / slurm_secret.FILE], capture_output=True, text=True, timeout=20)
    assert "Permission denied" in read.stderr
    # the store's protocol, with what squeue shows to everyone; this user may not read the project, so it has no client
    greeting = "b'\\x00' + (0x3C85F7CE).to_bytes(4, 'little') + b'\\x0d' + (0xC10D57A9).to_bytes(4, 'little')"
    steal = (
        f"import socket; s = socket.create_connection(('127.0.0.1', {store.port})); s.sendall({greeting}); s.recv(36);"
        "s.sendall(bytes(64)); s.sendall(b'\\x03' + (4).to_bytes(8, 'little') + b'/key'); print(s.recv(99))"
    )
    stolen = subprocess.run(
        [*other, "/usr/bin/env", "python3", "-c", steal], capture_output=True, text=True, timeout=20
    )
    assert "of the job" not in stolen.stdout + stolen.stderr
    assert stolen.stdout.strip() == "b''" or "Connection reset" in stolen.stderr or "denied" in stolen.stderr
    assert store.get("key") == b"of the job"


def test_hosts_that_share_nothing(home, monkeypatch):
    monkeypatch.setattr(slurm_secret, "file_system", lambda folder: "ext4")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(slurm_secret, "ELSEWHERE", "")
    with pytest.raises(hpcdist.DistBackendError, match=r"HPCDIST_STORE_SECRET=\$\(openssl rand"):
        slurm_secret.key_of(HOSTS)
    monkeypatch.setenv(slurm_secret.VARIABLE, "chosen")
    assert slurm_secret.key_of(HOSTS) == b"chosen"
    monkeypatch.delenv(slurm_secret.VARIABLE)
    monkeypatch.setattr(slurm_secret, "file_system", lambda folder: "nfs4")
    assert len(slurm_secret.key_of(HOSTS)) == slurm_secret.LENGTH


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv(slurm_secret.VARIABLE, raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # whom the system does not know
    monkeypatch.setattr(slurm_secret, "tool", lambda name: name)
    assert slurm_secret.key_of(["n1"]) is None  # MUNGE needs none
    monkeypatch.setattr(slurm_secret, "tool", lambda name: None)
    with pytest.raises(hpcdist.DistBackendError, match=r"user 54321 has no home .*HPCDIST_STORE_SECRET="):
        slurm_secret.key_of(["n1"])


def test_a_home_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.delenv(slurm_secret.VARIABLE, raising=False)
    monkeypatch.setattr(slurm_secret, "tool", lambda name: name)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert slurm_secret.key_of(["n1"]) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        assert slurm_secret.key_of(["n1"]) is None
        assert not list(tmp_path.iterdir())
    key = slurm_secret.key_of(["n1"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert slurm_secret.key_of(["n1"]) == key is not None  # made before, as on a login node


def test_the_file_system_of_a_folder():
    assert slurm_secret.file_system(slurm_secret.Path("/proc/self")) == "proc"


@pytest.mark.skipif(shutil.which("munged") is None or os.getuid() != 0, reason="needs MUNGE, and root to start it")
def test_munge_hands_out_the_secret(home, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("munge")
    for each in (folder, *list(folder.parents)[:3]):  # another user asks it too
        each.chmod(0o755)
    key, socket = folder / "key", folder / "socket"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    options = [f"--{name}-file={folder / name}" for name in ("pid", "log", "seed")]
    daemon = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for name in ("munge", "unmunge"):
            (folder / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={socket} "$@"\n')
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        while not socket.exists():
            assert daemon.poll() is None, (folder / "log").read_text()
            time.sleep(0.01)
        monkeypatch.setattr(slurm_secret, "file_system", lambda folder: "ext4")
        assert slurm_secret.key_of(HOSTS) is None
        sealed = slurm_secret.seal("77.0.0", 5, b"secret")
        assert slurm_secret.unseal("77.0.0", sealed) == (5, b"secret")
        assert slurm_secret.unseal("78.0.0", sealed) is None
        assert slurm_secret.unseal("77.0.0", "MUNGE:nothing:") is None
        of_another = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", shutil.which("munge", path="/usr/bin"),
             f"--socket={socket}", "--string=[\"77.0.0\", 5, \"00\"]"], capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert of_another.returncode == 0, of_another.stderr
        assert slurm_secret.unseal("77.0.0", of_another.stdout.strip()) is None
        ports = [free_port()]
        first = rendezvous.by_munge(0, "127.0.0.1", ports, "77.0.0", LIMIT)
        second = rendezvous.by_munge(1, "127.0.0.1", ports, "77.0.0", LIMIT)
        first.set("key", "value")
        assert second.get("key") == b"value"
        rendezvous.NOTICES.pop()  # the second one has found it
    finally:
        daemon.terminate()
        daemon.wait(10)
