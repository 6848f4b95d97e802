"""Names in /proc that are not text: of files, of others' sockets and processes, in folders with spaces."""

import os
import socket
from pathlib import Path

from hpcdist.backends.mpi.process import libraries
from hpcdist.launch import arrival

MAPS = """\
7f00-7f01 r--p 00000000 fe:00 11                         /opt/a folder/lib/libmpi.so.40
7f01-7f02 r-xp 00001000 fe:00 11                         /opt/a folder/lib/libmpi.so.40
7f02-7f03 rw-s 00000000 fe:00 12                         /home/andr\xe9/notes
7f03-7f04 r--p 00000000 fe:00 13                         /home/andr\xe9/lib/libmpich.so
7f04-7f05 rw-p 00000000 00:00 0
"""


def test_libraries_are_found_in_any_folder(tmp_path, monkeypatch):
    (tmp_path / "maps").write_bytes(MAPS.encode("latin-1"))
    monkeypatch.setattr(libraries, "MAPS", tmp_path / "maps")
    expected = [b"/opt/a folder/lib/libmpi.so.40", b"/home/andr\xe9/lib/libmpich.so"]
    assert [os.fsencode(each) for each in libraries.loaded_libraries()] == expected


def test_a_rank_that_has_come_is_found_beside_a_socket_of_any_name():
    with socket.socket(socket.AF_UNIX) as other, arrival.announce(1, 2):
        other.bind(b"\0\xff\xfe of andr\xe9")
        assert arrival.Arrival(os.getpid(), 1, 2) in arrival.arrivals()


def test_the_parent_of_a_process_of_any_name():
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"pr\xfcfung")
    try:
        assert arrival.launcher_of(os.getpid()) > 0
    finally:
        name.write_bytes(before)
