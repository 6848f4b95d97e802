"""The doctor's findings on given facts, as ranks return them."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from hpcdist.cli import doctor
from hpcdist.cli.doctor import (
    devices,
    installed,
    memory,
    mpi_library,
    mpi_world,
    network,
    page,
    placement,
    slurm_step,
    speed,
)
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Finding
from hpcdist.cli.doctor.supervision import supervise
from hpcdist.launch import topology
from tests import programs
from tests.ports import free_port


def levels(findings):
    return {finding.level for finding in findings}


def found(findings, text):
    findings = list(findings)
    matching = [finding for finding in findings if text in finding.text]
    assert matching, f"{text!r} in none of {findings}"
    return matching[0]


def ranks_like(look, *changes):
    """Return, when it is asked, what this process sees, once for each rank, changed."""
    return lambda: [{**look(), **change} for change in changes]


def cores(cpus, ranks, **more):
    facts = {"cores": list(range(cpus)), "quota": None, "threads": 1, "launcher_size": None, **more}
    return ranks_like(placement.look, *[facts] * ranks)


def bound(*sets):
    same = {"quota": None, "threads": 1, "launcher_size": None, "numa": [0]}
    return ranks_like(placement.look, *({"cores": each, "physical": each, **same} for each in sets))


def world(has_btl_ofi, seconds):
    same = {"world": 2, "thread_level": "MULTIPLE", "ulfm": "works", "gpu_memory": None}
    return lambda: [{**same, "has_btl_ofi": has_btl_ofi, "start_seconds": seconds}] * 2


def memories(changes, ranks=1):
    return ranks_like(lambda: memory.look(None), *[changes] * ranks)


def table_for(processor, **given):
    return memories({"processor": processor, "thresholds": {"setting": "", "file": "", "error": "", **given}})


def node(name, tried, named="10.0.0.1", answered=()):
    return {"node": name, "interfaces": {"eth0": "10.0.0.1"}, "named": [named], "tried": tried, "answered": answered}


def reaching(name, other, *more):
    return node(name, [(other, "name", other, 0.1), (other, "eth0", "10.0.0.1", 0.1)], *more)


def speeds(latency, bandwidth, backend="mpi", wrong=()):
    times = {speed.SMALL: latency, speed.LARGE: speed.LARGE / bandwidth}
    return lambda: [{"backend": backend, "wrong": wrong, "all_reduce": times, "pairs": {"between nodes": times}}] * 2


def step(library, pmis, default="none"):
    same = {"srun": "/srun", "job": "7", "step": "0", "nodes": "n1", "tasks": "4", "answers": True, "mpi": None}
    return lambda: [{**same, "library": library, "pmis": pmis.split(), "default": default}]


def gpus(*changes):
    same = {"driver": ["H200, 550"], "node": "a", "visible": None, "count": 2, "built_for": "13.0", "computed": "works"}
    return lambda: [{**same, **change} for change in changes]


def started(**facts):
    launched = {"library": "Open MPI 5.0.11", "mpirun": "/bin/mpirun", "started": False, "survives": None, **facts}
    return lambda: launched


EPYC, ARM = "AMD EPYC 9654", "aarch64 0x41 0xd40"
CRAY = "CRAY MPICH version 8.1.29.15 (ANL base 3.4a2)"
TOO_LITTLE = {"free": 64 << 20, "locked": None, "tried": "no room", "ranks": 32}
MIXED = ranks_like(installed.look, {}, {"torch": "2.99.0"}, {}, {})
SAID = "[vm:1] Error: Unable to get the user home directory\n  mca_base_var_init failed"
ILL_NAMED = [reaching("a", "b", "127.0.1.1"), reaching("b", "a", "10.0.0.2", ["a"])]
WELL = [reaching("a", "b", "10.0.0.1", ["b"]), reaching("b", "a", "10.0.0.2", ["a"])]
APART = [node("a", [("b", "name", "b.example", "timed out")]), node("b", [("a", "ib0", "10.1.0.1", "refused")])]

# the judge and the facts; what one finding says, its level, and what its remedy has
FINDINGS = [
    (installed.judge, MIXED, "torch differs between ranks", PROBLEM, "srun"),
    (installed.judge, MIXED, "on ranks 0, 2, 3; 2.99.0 on rank 1", PROBLEM, ""),
    (mpi_world.judge, world(True, 1.3), "1.3 s", ADVICE, "OMPI_MCA_btl=^ofi"),
    (memory.judge, table_for(EPYC), "the built-in table", OK, ""),
    (memory.judge, table_for(ARM), "not on aarch64 0x41 0xd40", ADVICE, "hpcdist tune"),
    (memory.judge, table_for(ARM, setting="64K"), "HPCDIST_SHM=64K", NOTE, ""),
    (memory.judge, table_for(ARM, setting="a.json"), "not on aarch64", ADVICE, "hpcdist tune"),
    (memory.judge, table_for(EPYC, file="/etc/thresholds.json"), "/etc/thresholds.json", OK, ""),
    (memory.judge, table_for(EPYC, error="'a.json': not JSON"), "not JSON", PROBLEM, "hpcdist tune"),
    (memory.judge, memories(TOO_LITTLE, 32), "64 MiB free, but 32 ranks a node need 256 MiB", PROBLEM, "--shm-size"),
    (placement.judge, cores(2, 3), "3 ranks share 2 cores", ADVICE, "-n 2"),
    (placement.judge, cores(8, 2, quota=1.5), "2 ranks share 1.5 cores", ADVICE, ""),
    (placement.judge, cores(8, 4, threads=8), "4 ranks of 8 torch threads", ADVICE, "export OMP_NUM_THREADS=2"),
    (placement.judge, bound([0, 1], [2, 3]), "has its own cores", OK, ""),
    (placement.judge, bound([0, 1], [1, 2]), "bindings overlap", ADVICE, ""),
    (placement.judge, bound([0, 1], [0, 1]), "are not bound", NOTE, "--cpu-bind=cores"),
    (network.judge, lambda: APART, "1 pairs of nodes do not meet", PROBLEM, ""),
    (network.judge, lambda: APART, "b does not reach a on ib0", ADVICE, ""),
    (network.judge, lambda: WELL, "2 directed pairs exchange UDP", OK, ""),
    (network.judge, lambda: ILL_NAMED, "1 of 2 directed pairs of nodes that meet by TCP exchange no UDP", PROBLEM, ""),
    (network.judge, lambda: ILL_NAMED, "the name a means the loopback (127.0.1.1)", ADVICE, "GLOO_SOCKET_IFNAME=eth0"),
    (speed.judge, speeds(60e-6, 10e9), "a message between nodes", ADVICE, ""),
    (speed.judge, speeds(2e-6, 0.1e9), "MPI uses TCP", ADVICE, ""),
    (speed.judge, speeds(60e-6, 0.1e9, "gloo"), "gloo's sockets", NOTE, ""),
    (speed.judge, speeds(2e-6, 10e9, "mpi", ["torch.bfloat16"]), "torch.bfloat16", PROBLEM, ""),
    (slurm_step.judge, step("Open MPI v5.0.11", "none pmi2"), "Open MPI needs pmix", PROBLEM, ""),
    (slurm_step.judge, step("MPICH 5.0.2", "none pmi2"), "srun has pmi2, which MPICH needs: srun --mpi=pmi2", OK, ""),
    (slurm_step.judge, step(CRAY, "cray_shasta none pmi2"), "srun --mpi=cray_shasta", OK, ""),
    (slurm_step.judge, step(CRAY, "none pmi2"), "srun --mpi=pmi2", OK, ""),
    (slurm_step.judge, step(CRAY, "cray_shasta none", "cray_shasta"), "no --mpi is needed", OK, ""),
    (slurm_step.judge, step("Open MPI v5.0.11", "none pmix pmix_v4", "pmix_v4"), "no --mpi is needed", OK, ""),
    (slurm_step.judge, step("Open MPI v5.0.11", "none pmi2 pmix", "pmi2"), "srun --mpi=pmix", OK, ""),
    (devices.judge, gpus(*[{"index": 0, "uuid": "u0"}] * 2), "ranks 0, 1 share one GPU", ADVICE, ""),
    (devices.judge, gpus({"index": 0, "uuid": "u0", "computed": "CUDA error: ECC"}), "CUDA error: ECC", PROBLEM, ""),
    (devices.judge, gpus({"count": 0, "visible": "", "index": None, "computed": None}), "torch sees none", PROBLEM, ""),
    (mpi_library.judge_launcher, started(said=SAID), "HOME is not set", PROBLEM, "export HOME=~"),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "facts", "text", "level", "remedy"), FINDINGS)
def test_a_finding(judge, facts, text, level, remedy):
    finding = found(judge(facts()), text)
    assert (finding.level, remedy in finding.remedy) == (level, True)
    assert bool(finding.remedy) == (bool(remedy) or level in (ADVICE, PROBLEM))


@pytest.mark.parametrize(
    ("judge", "facts"),
    [
        (mpi_world.judge, world(True, 0.4)),
        (mpi_world.judge, world(False, 1.3)),
        (network.judge, lambda: WELL),
        (speed.judge, speeds(2e-6, 10e9)),
        (slurm_step.judge, step("MPICH 5.0.2", "none pmi2")),
        (devices.judge, gpus(*({"index": i, "uuid": f"u{i}"} for i in range(2)))),
    ],
)
def test_what_is_well_has_no_advice(judge, facts):
    assert levels(judge(facts())) <= {OK, NOTE}


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set())])
def test_lists_of_cpus(text, numbers):
    assert topology.cpus(text) == numbers


def test_a_connection_is_made_refused_and_answered_by_somebody_else():
    with network.listening(b"word") as port:
        assert isinstance(network.connect("127.0.0.1", port, b"word"), float)
        assert network.connect("127.0.0.1", port, b"warp") == "somebody else answers there"
    assert "refused" in str(network.connect("127.0.0.1", free_port(), b"word"))


def test_what_it_starts_has_the_users_settings_and_nothing_of_a_launcher(monkeypatch):
    settings = {"PMIX_MCA_gds", "MPIR_CVAR_CH4_NETMOD", "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl"}
    left = {"PMIX_RANK", "PRTE_LAUNCHED", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}
    for name in settings | left:
        monkeypatch.setenv(name, "1")
    assert mpi_library.mpi_free_environment().keys() & (settings | left) == settings


def test_the_ranks_of_an_allocation_have_the_cpus_that_the_jobs_have(tmp_path, monkeypatch):
    for name, said in (("srun", "pmi2 pmix none"), ("scontrol", "JobId=7 NumNodes=2 NumCPUs=32 NumTasks=8")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    monkeypatch.setattr(slurm_step, "library", lambda: "MPICH 5.0.2")
    monkeypatch.setattr(slurm_step.environment, "detect", lambda: None)
    whole = ["--cpus-per-task=4", "--nodes=2", "--ntasks=8", "--mpi=pmi2"]
    assert slurm_step.whole_allocation()[1:] == whole
    assert slurm_step.whole_allocation(2)[1:] == ["--nodes=2", "--ntasks=2", "--mpi=pmi2"]  # which may not have room
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert slurm_step.whole_allocation()[1:] == ["--overlap", *whole[1:]]  # those of the step, not of the job


# -- what ends the process -----------------------------------------------------------------------------------


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("check", "status", "said"),
    [
        (lambda: 0, 0, []),
        (lambda: 1, 1, []),
        (killed, 1, ["memory ended the process with signal 9"]),
        (lambda: os._exit(0), 1, ["memory ended the process with status 0"]),
        (lambda: time.sleep(60), 1, ["memory did not finish within 0.5 s"]),
    ],
)
def test_checks_that_end_well_or_in_their_midst_or_never(check, status, said):
    def work(tell):
        tell("memory")
        return check()

    start, reports = time.monotonic(), []
    assert supervise(work, 0.5 if "within" in str(said) else 30, reports.append) == status
    assert time.monotonic() - start < 10
    assert reports == said


@pytest.mark.parametrize("is_everyone", [True, False])
def test_ctrl_c_ends_the_checks_without_a_traceback(is_everyone):
    code = """
import os, signal, time
from hpcdist.cli.doctor.supervision import supervise

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell lets programs ignore it

def work(tell):
    print(os.getpid(), flush=True)
    time.sleep(60)

try:
    supervise(work, 30, print)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = programs.start([sys.executable, "-c", code])
    checks = int(process.stdout.readline())
    os.kill(-process.pid if is_everyone else process.pid, signal.SIGINT)
    assert programs.output(process, 30) == ("interrupted\n", "")
    with pytest.raises(ProcessLookupError):
        os.kill(checks, 0)


def test_where_two_processes_may_not_share_a_connection_a_thread_looks_at_the_clock():
    code = """
import time
from hpcdist.cli.doctor.supervision import watch

def work(tell):
    tell("memory")
    time.sleep(60)

watch(work, 0.5, print)
"""
    done = programs.run([sys.executable, "-c", code], timeout=40)
    assert (done.returncode, done.stdout) == (1, "memory did not finish within 0.5 s\n")


def test_what_killed_mpiruns_left_is_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"ompi.{ended.pid}", f"ompi.{os.getpid()}", "ompi.vm.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hwloc.sm").touch()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        assert mpi_library.dead_sessions() == []
    with open(tmp_path / f"ompi.{ended.pid}" / "hwloc.sm", "rb+"):  # by an mpirun of another container, with this id
        assert mpi_library.dead_sessions() == []
    assert mpi_library.dead_sessions() == [str(tmp_path / f"ompi.{ended.pid}")]
    facts = {"library": "Open MPI 5.0.11", "mpirun": "/bin/mpirun", "started": True, "survives": None}
    findings = mpi_library.judge_launcher({**facts, "dead_sessions": mpi_library.dead_sessions()})
    advice = found(findings, "left 1 session folder;")
    assert advice.level == ADVICE
    assert advice.remedy == f"rm -r {tmp_path / f'ompi.{ended.pid}'}"


@pytest.mark.skipif(not programs.HAS_ULFM, reason="other MPIs have no such folder")
def test_an_mpirun_keeps_a_file_of_its_session_folder_open(tmp_path, monkeypatch):
    """So one in another container, whose process is not seen, is not taken for dead."""
    code = "import os, signal; os.mkdir('started'); signal.pause()"
    job = programs.start(programs.mpirun_command(1, ["-c", code]), tmp_path, TMPDIR=str(tmp_path))
    try:
        while not (tmp_path / "started").exists():
            assert job.poll() is None, programs.output(job, 10)
            time.sleep(0.01)
        (session,) = tmp_path.glob("ompi.*")
        with monkeypatch.context() as unseen:
            unseen.setattr(mpi_library.Path, "exists", lambda path: False)
            assert mpi_library.dead_sessions(tmp_path) == []
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        programs.output(job, 10)
    while not mpi_library.is_closed(session / "hwloc.sm"):  # its rank may end a moment later
        time.sleep(0.01)
    assert mpi_library.dead_sessions(tmp_path) == [str(session)]


@pytest.mark.parametrize("dtype", speed.DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 129, 300])
def test_each_dtype_holds_the_sums_of_any_number_of_ranks(dtype, size):
    """A sum of ranks' numbers above 256 is none of bfloat16's."""
    total = sum(speed.addends(rank, size).to(dtype) for rank in range(size))
    assert torch.equal(total, speed.expected_sums(size).to(dtype))
    assert (total != speed.addends(0, size).to(dtype)).any() or size == 1


def test_a_page_that_cannot_be_written_is_said_and_not_well(tmp_path, capsys):
    for name, is_written in (("page.html", True), ("absent/page.html", False)):
        options = doctor.parser().parse_args(["--json", "--html", str(tmp_path / name)])
        assert doctor.show({"Topic": [Finding(OK, "fine")]}, [{}], options) is is_written
        assert ("error: [Errno 2] No such file or directory" in capsys.readouterr().err) is not is_written


@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "✓·!✗"), ("ascii", "+.!x")])
def test_the_page_in_any_locale_and_width(encoding, marks, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setenv("COLUMNS", "wide")
    page.write({"Topic": [Finding(level, f"so {level}", "do") for level in (OK, NOTE, ADVICE, PROBLEM)]}, 1)
    written.flush()
    lines = written.buffer.getvalue().decode(encoding).splitlines()
    shown = [line[0] for line in lines if " so " in line]
    assert "".join(shown) == marks + marks[3] + marks[2]
    assert max(map(len, lines)) == 110
