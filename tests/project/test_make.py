"""Where `make` takes torch from: the index of builds for CPUs, on a machine without a GPU that reaches it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# pip's own settings aside: this machine may have a mirror
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}


class Index(BaseHTTPRequestHandler):
    """Answers for torch, and for nothing else."""

    def do_GET(self):
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def index():
    server = HTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def taken(url: str, driver: str = "/no/driver", seconds: int = 60, **variables: str) -> str:
    done = subprocess.run(
        ["make", "-s", "torch-index", f"CPU_TORCH={url}", f"DRIVER={driver}", f"ANSWER_S={seconds}"],
        cwd=ROOT, env=CLEAN | {"PIP_CONFIG_FILE": "/dev/null"} | variables, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_index_of_builds_for_cpus(index):
    assert taken(f"{index}/cpu") == f"--extra-index-url {index}/cpu"
    assert taken(f"{index}/cpu", driver="/") == ""
    assert taken(f"{index}/cpu", PIP_INDEX_URL="https://mirror.example/simple") == ""
    assert taken(f"{index}/other") == ""


def test_an_index_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cpu"
        assert taken(url, seconds=1) == ""
    assert taken(url) == ""
