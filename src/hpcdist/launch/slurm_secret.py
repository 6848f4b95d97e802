"""Secret of a Slurm step without MPI, derived from a file that only its user can read.

squeue shows job and step to all users, so the secret is an HMAC over them, keyed by a random file in the user's home,
which the first rank that needs it makes. If the step has several hosts and the home is a local disk, MUNGE, on which
Slurm itself relies, encrypts a random secret for this user (``seal`` and ``unseal``).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.core.errors import DistBackendError
from hpcdist.core.printing import add_hint

VARIABLE = "HPCDIST_STORE_SECRET"  # the user's own secret, for hosts without a shared home and without MUNGE
FILE = Path(".hpcdist", "store-key")  # in the home
LENGTH = 32
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs", "rootfs"}
ELSEWHERE = os.defpath  # folders of MUNGE, if they are not on the PATH
MUNGE_SECONDS = 10


def secret(identity: str, key: bytes) -> bytes:
    return hmac.digest(key, b"hpcdist slurm:// " + identity.encode(), "sha256")


def key_of(hosts: list[str]) -> bytes | None:
    """Return the key that this user's ranks on all hosts of a step can read, or None if they need MUNGE."""
    if own := os.environ.get(VARIABLE):
        return own.encode()
    home = Path(os.path.expanduser("~"))  # ``~`` if it is unknown, as in a container with another user's number
    key, is_there = home / FILE, home.is_absolute() and os.path.isdir(home)
    has_home = is_there and (os.path.exists(key) or os.access(home, os.W_OK))  # read-only on compute nodes
    if has_home and (len(set(hosts)) == 1 or file_system(home) not in LOCAL):
        return key_in(key)
    if tool("munge") and tool("unmunge"):
        return None
    none = f"user {os.getuid()} has no home that can be written to (HOME is {home})"
    why = f"the home {home} is on a disk of this host" if has_home else none
    text = (
        f"slurm:// has no secret that the hosts of this step share: {why}, and there is no munge. Set {VARIABLE} in "
        f"the job script: export {VARIABLE}=$(openssl rand -hex 32)"
    )
    raise DistBackendError(add_hint(text, "store-secret"))


def tool(name: str) -> str | None:
    """Return the path of a command of MUNGE, if it is installed."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), ELSEWHERE)))


def file_system(folder: Path) -> str:
    kinds = {}
    for line in filter(None, os.fsdecode(Path("/proc/self/mounts").read_bytes()).split("\n")):
        _, place, kind, *_ = line.split()
        kinds[place.replace("\\040", " ")] = kind
    real = folder.resolve()
    return next((kinds[str(each)] for each in (real, *real.parents) if str(each) in kinds), "")


def key_in(file: Path) -> bytes:
    """Return the random key in a file that only this user can read, made if it is missing, or raise."""
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if not file.exists():
            make(file)
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
        try:
            about, folder, key = os.fstat(fd), os.stat(file.parent, follow_symlinks=False), os.read(fd, LENGTH)
        finally:
            os.close(fd)
    except OSError as error:
        raise refuse(file, str(error)) from error
    for each in (about, folder):
        if each.st_uid != os.getuid() or stat.S_IMODE(each.st_mode) & 0o077:
            raise refuse(file, f"it belongs to user {each.st_uid} with mode {stat.S_IMODE(each.st_mode):o}")
    if len(key) != LENGTH or not stat.S_ISREG(about.st_mode):
        raise refuse(file, f"it is not a regular file of {LENGTH} bytes")
    return key


def make(file: Path) -> None:
    """Make a key atomically: if several ranks do so at once, one wins, and all read its key."""
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_bytes(LENGTH))
        os.fsync(fd)
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        os.close(fd)
        draft.unlink()


def refuse(file: Path, why: str) -> DistBackendError:
    text = (
        f"slurm:// cannot use {file}, which holds the key of this user's jobs: {why}. Remove it, or set {VARIABLE} in "
        "the job script"
    )
    return DistBackendError(add_hint(text, "store-secret"))


def seal(identity: str, port: int, content: bytes) -> str:
    """Return a MUNGE credential that only this user's processes can read, with the store's port and secret."""
    text = json.dumps([identity, port, content.hex()])
    command = [tool("munge") or "munge", "--restrict-uid", str(os.getuid())]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=MUNGE_SECONDS)
    if done.returncode:
        raise DistBackendError(add_hint(f"slurm:// found no secret: munge said {done.stderr.strip()}", "store-secret"))
    return done.stdout.strip()


def unseal(identity: str, credential: str) -> tuple[int, bytes] | None:
    """Return port and secret of a credential; None for one of another user or step."""
    command = [tool("unmunge") or "unmunge", "--keys", "UID,STATUS", "--metadata", "/dev/fd/2"]
    done = subprocess.run(command, input=credential, capture_output=True, text=True, timeout=MUNGE_SECONDS)
    if done.returncode or not any(
        line.startswith("UID:") and line.rstrip().endswith(f"({os.getuid()})") for line in done.stderr.splitlines()
    ):
        return None
    said: Any = None
    with suppress(ValueError):
        said = json.loads(done.stdout)
    if not isinstance(said, list) or len(said) != 3 or said[0] != identity:
        return None
    return int(said[1]), bytes.fromhex(said[2])
