"""Subjects of ``python -m hpcdist bench`` on 2 ranks: every row has a figure of each side."""

import html
import json
import re
import sys

import pytest
import torch

from hpcdist.cli import bench, web_page
from hpcdist.cli.bench import plots
from hpcdist.cli.bench.timing import Figure
from tests.forked import mpirun
from tests.programs import MPIRUN, run

pytestmark = pytest.mark.timeout(300)
needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
OURS, MPI, GLOO, TORCHS, SYNC = "hpcdist", "mpi4py", "gloo", "torch's part", "synchronous"

LIMITED = {OURS, MPI, TORCHS, "mpi4py + torch's part"}
ROWS = {
    "latency": {
        "all_reduce": {OURS, MPI},
        "all_reduce, async_op and wait": {OURS, SYNC, MPI, GLOO},
        "all_reduce of functional collectives": {OURS, SYNC, TORCHS},
        "irecv and isend, and waits": {OURS, MPI},
    },
    "varied": {"all_gather_varied": {OURS, MPI, "in slots"}, "all_to_all_varied": {OURS, MPI}},
    "halo": {key: {OURS, MPI} for key in ("halo, 2 rows", "halo, 2 columns", "exchange with 2 ranks")},
    "calls": dict.fromkeys(("all_reduce", "all_gather, list", "irecv and isend, and waits"), LIMITED),
    "ddp": {"DDP step": {OURS, GLOO, TORCHS}},
    "torch": {
        **{key: {OURS, GLOO, TORCHS} for key in ("DDP step", "FSDP2 step", "DTensor redistribute")},
        **{key: {OURS, GLOO, TORCHS} for key in ("tensor-parallel block", "checkpoint save")},
        "pipeline step": {OURS, GLOO},
    },
}


@needs_mpirun
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


@needs_mpirun
def test_explain_times_nothing(tmp_path):
    file = tmp_path / "figures.json"
    done = mpirun(2, ["-m", "hpcdist", "bench", "--explain", "--json", file], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Through shared memory" in done.stdout
    assert not file.exists()


@needs_mpirun
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.run(["--device", "cuda"])
    said = capsys.readouterr().err
    assert any(text in said for text in ("nccl4py", "built without CUDA", "no NVIDIA driver", "sees no GPU"))
