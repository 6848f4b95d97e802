"""Subjects of ``python -m hpcdist bench`` on 2 ranks: every row has a figure of each side."""

import html
import json
import re
import sys

import pytest

from hpcdist.cli import bench, web_page
from hpcdist.cli.bench import plots
from hpcdist.cli.bench.timing import Figure
from tests.forked import mpirun
from tests.programs import MPIRUN, run

pytestmark = pytest.mark.timeout(300)

ROWS = {
    "latency": {
        "all_reduce": {"hpcdist", "mpi4py"},
        "all_reduce, async_op and wait": {"hpcdist", "synchronous", "mpi4py", "gloo"},
        "all_reduce of functional collectives": {"hpcdist", "synchronous", "torch's part"},
        "irecv and isend, and waits": {"hpcdist", "mpi4py"},
    },
    "varied": {"all_gather_varied": {"hpcdist", "mpi4py", "in slots"}, "all_to_all_varied": {"hpcdist", "mpi4py"}},
    "halo": {
        "halo, 2 rows": {"hpcdist", "mpi4py"},
        "halo, 2 columns": {"hpcdist", "mpi4py"},
        "exchange with 2 ranks": {"hpcdist", "mpi4py"},
    },
    "calls": {
        "all_reduce": {"hpcdist", "mpi4py", "torch's part", "mpi4py + torch's part"},
        "all_gather, list": {"hpcdist", "mpi4py", "torch's part", "mpi4py + torch's part"},
        "irecv and isend, and waits": {"hpcdist", "mpi4py", "torch's part", "mpi4py + torch's part"},
    },
    "ddp": {"DDP step": {"hpcdist", "gloo", "torch's part"}},
    "torch": {
        "DDP step": {"hpcdist", "gloo", "torch's part"},
        "FSDP2 step": {"hpcdist", "gloo", "torch's part"},
        "DTensor redistribute": {"hpcdist", "gloo", "torch's part"},
        "tensor-parallel block": {"hpcdist", "gloo", "torch's part"},
        "pipeline step": {"hpcdist", "gloo"},
        "checkpoint save": {"hpcdist", "gloo", "torch's part"},
    },
}


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
@pytest.mark.parametrize("subject", ROWS)
def test_every_row_has_each_side(subject, tmp_path):
    file, page = tmp_path / "figures.json", tmp_path / "figures.html"
    options = ["--rounds", 1, "--seconds", 0.001, "--json", file, "--html", page]
    program = ["hpcdist", "bench"] if subject in bench.SUBJECTS else ["tests.bench"]
    done = mpirun(2, ["-m", *program, subject, *options], timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for figure in json.loads(file.read_text())["figures"]:
        assert figure["median"] > 0
        found.setdefault(figure["what"], set()).add(figure["side"])
    assert {what: found.get(what) for what in ROWS[subject]} == ROWS[subject]
    text = page.read_text()
    assert text.count("<svg") == text.count("<section>") >= len(found)
    assert not [what for what in found if html.escape(what) not in text]


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
def test_explain_times_nothing(tmp_path):
    file = tmp_path / "figures.json"
    done = mpirun(2, ["-m", "hpcdist", "bench", "--explain", "--json", file], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Through shared memory" in done.stdout
    assert not file.exists()


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    done = mpirun(
        2, ["-m", "hpcdist", "bench", "--seconds", 60, "--json", tmp_path / "gone" / "figures.json"], timeout=60
    )
    assert done.returncode != 0
    assert done.stderr.count("error: [Errno 2] No such file or directory") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_page_loads_nothing_and_its_colors_are_all_known():
    figures = [
        Figure("all_reduce", "float32", nbytes, side, time, time / 2, 2 * time)
        for side, time in (("hpcdist", 10.0), ("<b>", 2000.0))
        for nbytes in (4, 1 << 20)
    ]
    line, bars = plots.parts([*figures, Figure("barrier", "", 0, "hpcdist", 1.5, 1.4, 1.6)])
    assert ("1 MiB" in line, "2 ms" in line, "0.005" in line) == (True, True, True)
    assert (">barrier<" in bars, "1.5 µs" in bars) == (True, True)
    assert "<b>" not in line + bars
    links = re.findall(r"""(?:href|src)="([^"]*)|url\(([^)]*)""", line + bars)
    assert all("".join(link).startswith("#") for link in links), links
    used = set(re.findall(r"var\(--(\w+)\)", line + bars))
    assert {"ink", "side0", "side1"} <= used <= set(web_page.COLORS)


def test_a_page_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="2"):
        bench.run(["--html", "page.html"])
    assert "pip install 'hpcdist[plot]'" in capsys.readouterr().err


def test_a_process_that_no_mpi_launcher_started_is_told_how_to_start_it():
    done = run([sys.executable, "-m", "hpcdist", "bench"], timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("mpirun -n 2 python -m hpcdist bench")
    assert "Traceback" not in done.stderr
