"""The doctor's findings on given facts, as ranks return them."""

from __future__ import annotations

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
from hpcdist.core.ranks import listed
from hpcdist.launch import topology
from tests import programs
from tests.ports import free_port


def levels(findings):
    return {finding.level for finding in findings}


def found(findings, text):
    matching = [finding for finding in findings if text in finding.text]
    assert matching, f"{text!r} in none of {findings}"
    return matching[0]


def of_ranks(look, *changes):
    """Return what this process sees, once for each rank, changed."""
    seen = look()
    return [{**seen, **change} for change in changes]


def test_versions_that_differ_are_a_problem_and_say_where():
    ranks = of_ranks(installed.look, {}, {"torch": "2.99.0"}, {}, {})
    problem = found(installed.judge(ranks), "torch differs between ranks")
    assert problem.level == PROBLEM
    assert "2.99.0 on rank 1" in problem.text
    assert "on ranks 0, 2, 3" in problem.text
    assert problem.remedy


@pytest.mark.parametrize(
    ("has_btl_ofi", "seconds", "is_named"), [(True, 1.3, True), (True, 0.4, False), (False, 1.3, False)]
)
def test_the_second_that_open_mpi_sleeps_is_advice(has_btl_ofi, seconds, is_named):
    world = {"world": 2, "thread_level": "MULTIPLE", "ulfm": "works", "large_counts": True, "gpu_memory": None}
    facts = [{**world, "has_btl_ofi": has_btl_ofi, "start_seconds": seconds}] * 2
    advice = [each for each in mpi_world.judge(facts) if each.level == ADVICE]
    assert [("1.3 s" in each.text, "OMPI_MCA_btl=^ofi" in each.remedy) for each in advice] == [(True, True)] * is_named


@pytest.mark.parametrize(
    ("processor", "found", "level", "text"),
    [
        ("AMD EPYC 9654", {}, OK, "the built-in table"),
        ("aarch64 0x41 0xd40", {}, ADVICE, "not on aarch64 0x41 0xd40"),
        ("aarch64 0x41 0xd40", {"setting": "64K"}, NOTE, "HPCDIST_SHM=64K"),
        ("aarch64 0x41 0xd40", {"setting": "a.json"}, ADVICE, "not on aarch64"),
        ("AMD EPYC 9654", {"file": "/etc/hpcdist/thresholds.json"}, OK, "/etc/hpcdist/thresholds.json"),
        ("AMD EPYC 9654", {"error": "thresholds in 'a.json': not JSON"}, PROBLEM, "not JSON"),
    ],
)
def test_a_processor_that_was_not_measured_is_named(processor, found, level, text):
    facts = {"processor": processor, "thresholds": {"setting": "", "file": "", "error": "", **found}}
    finding = memory.judge_thresholds(facts, 1)
    assert finding.level == level
    assert text in finding.text
    assert ("hpcdist tune" in finding.remedy) == (level in (ADVICE, PROBLEM))


def test_more_ranks_than_cores_is_advice():
    cores = {"cores": [0, 1], "quota": None, "threads": 1, "launcher_size": None}
    ranks = of_ranks(placement.look, *[cores] * 3)
    advice = found(placement.judge(ranks), "3 ranks share 2 cores")
    assert advice.level == ADVICE
    assert "-n 2" in advice.remedy


def test_a_quota_of_the_control_group_counts_as_cores():
    cores = {"cores": list(range(8)), "quota": 1.5, "threads": 1, "launcher_size": None}
    ranks = of_ranks(placement.look, *[cores] * 2)
    assert found(placement.judge(ranks), "2 ranks share 1.5 cores").level == ADVICE


def test_bound_ranks_are_well_and_overlapping_ones_are_not():
    def bound(*sets):
        same = {"quota": None, "threads": 1, "launcher_size": None, "numa": [0]}
        changes = [{"cores": list(s), "physical": list(s), **same} for s in sets]
        return placement.judge(of_ranks(placement.look, *changes))

    assert found(bound([0, 1], [2, 3]), "has its own cores").level == OK
    assert found(bound([0, 1], [1, 2]), "bindings overlap").level == ADVICE
    assert found(bound([0, 1], [0, 1]), "are not bound").level == NOTE


def test_threads_beyond_the_cores_name_the_number_that_fits():
    cores = {"cores": list(range(8)), "quota": None, "threads": 8, "launcher_size": None}
    advice = found(placement.judge(of_ranks(placement.look, *[cores] * 4)), "4 ranks of 8 torch threads")
    assert advice.remedy == "export OMP_NUM_THREADS=2"


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set())])
def test_lists_of_cpus(text, numbers):
    assert topology.cpus(text) == numbers


def test_too_little_shared_memory_is_a_problem():
    changes = {"free": 64 << 20, "limit": None, "locked": None, "tried": "no room", "ranks": 32}
    ranks = of_ranks(lambda: memory.look(None), *[changes] * 32)
    problem = found(memory.judge(ranks), "/dev/shm has 64 MiB free, but 32 ranks a node need 256 MiB")
    assert problem.level == PROBLEM
    assert "--shm-size" in problem.remedy


def test_nodes_that_do_not_meet():
    alone = {"interfaces": {"eth0": "10.0.0.1"}, "named": ["10.0.0.1"], "answered": []}
    ranks = [
        {**alone, "node": "a", "tried": [("b", "name", "b.example", "timed out")]},
        {**alone, "node": "b", "tried": [("a", "ib0", "10.1.0.1", "refused")]},
    ]
    findings = list(network.judge(ranks))
    assert found(findings, "1 pairs of nodes do not meet").level == PROBLEM
    assert found(findings, "b does not reach a on ib0").level == ADVICE


def test_nodes_that_exchange_no_datagrams_and_names_that_mean_the_loopback():
    def rank(node, other, named, *answered):
        return {
            "node": node,
            "interfaces": {"eth0": "10.0.0.1"},
            "named": [named],
            "tried": [(other, "name", other, 0.1), (other, "eth0", "10.0.0.1", 0.1)],
            "answered": answered,
        }

    well = list(network.judge([rank("a", "b", "10.0.0.1", "b"), rank("b", "a", "10.0.0.2", "a")]))
    assert levels(well) == {OK, NOTE}
    assert found(well, "2 directed pairs exchange UDP")
    ill = list(network.judge([rank("a", "b", "127.0.1.1"), rank("b", "a", "10.0.0.2", "a")]))
    assert found(ill, "1 of 2 directed pairs of nodes that meet by TCP exchange no UDP").level == PROBLEM
    named = found(ill, "the name a means the loopback (127.0.1.1)")
    assert named.level == ADVICE
    assert "GLOO_SOCKET_IFNAME=eth0" in named.remedy


def test_a_connection_is_made_refused_and_answered_by_somebody_else():
    with network.listening(b"word") as port:
        assert isinstance(network.connect("127.0.0.1", port, b"word"), float)
        assert network.connect("127.0.0.1", port, b"warp") == "somebody else answers there"
    assert "refused" in str(network.connect("127.0.0.1", free_port(), b"word"))


def speeds(latency, bandwidth, backend="mpi"):
    times = {speed.SMALL: latency, speed.LARGE: speed.LARGE / bandwidth}
    facts = {"backend": backend, "wrong": [], "all_reduce": times, "pairs": {"between nodes": times}}
    return speed.judge([facts] * 2)


def test_slow_messages_get_advice_fast_ones_none():
    assert levels(speeds(2e-6, 10e9)) == {OK}
    assert found(speeds(60e-6, 10e9), "a message between nodes").level == ADVICE
    assert found(speeds(2e-6, 0.1e9), "MPI uses TCP").level == ADVICE
    assert found(speeds(60e-6, 0.1e9, "gloo"), "gloo's sockets").level == NOTE


def test_wrong_sums_are_a_problem():
    facts = {"backend": "mpi", "wrong": ["torch.bfloat16"], "all_reduce": {}, "pairs": {}}
    assert found(speed.judge([facts]), "torch.bfloat16").level == PROBLEM


def test_what_it_starts_has_the_users_settings_and_nothing_of_a_launcher(monkeypatch):
    settings = {"PMIX_MCA_gds", "MPIR_CVAR_CH4_NETMOD", "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl"}
    left = {"PMIX_RANK", "PRTE_LAUNCHED", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}
    for name in settings | left:
        monkeypatch.setenv(name, "1")
    assert mpi_library.mpi_free_environment().keys() & (settings | left) == settings


IN_STEP = {"srun": "/usr/bin/srun", "job": "7", "step": "0", "nodes": "n1", "tasks": "4", "answers": True, "mpi": None}


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


def test_srun_without_the_pmi_that_the_mpi_needs():
    ranks = [{**IN_STEP, "pmis": ["none", "pmi2"], "default": "none", "library": "Open MPI v5.0.11"}]
    assert found(slurm_step.judge(ranks), "Open MPI needs pmix").level == PROBLEM
    ranks[0]["library"] = "MPICH 5.0.2"
    assert PROBLEM not in levels(slurm_step.judge(ranks))
    assert found(slurm_step.judge(ranks), "srun has pmi2, which MPICH needs: srun --mpi=pmi2").level == OK


@pytest.mark.parametrize(
    ("library", "pmis", "default", "said"),
    [
        (
            "CRAY MPICH version 8.1.29.15 (ANL base 3.4a2)",
            ["cray_shasta", "none", "pmi2"],
            "none",
            "srun --mpi=cray_shasta",
        ),
        ("CRAY MPICH version 8.1.29.15 (ANL base 3.4a2)", ["none", "pmi2"], "none", "srun --mpi=pmi2"),
        ("CRAY MPICH version 8.1.29.15 (ANL base 3.4a2)", ["cray_shasta", "none"], "cray_shasta", "no --mpi is needed"),
        ("Open MPI v5.0.11", ["none", "pmix", "pmix_v4"], "pmix_v4", "no --mpi is needed"),
        ("Open MPI v5.0.11", ["none", "pmi2", "pmix"], "pmi2", "srun --mpi=pmix"),
    ],
)
def test_the_right_mpi_option_is_named(library, pmis, default, said):
    facts = {**IN_STEP, "pmis": pmis, "default": default, "library": library}
    assert found(slurm_step.judge([facts]), said).level == OK


def test_gpus():
    gpu = {"driver": ["H200, 550"], "node": "a", "visible": None, "count": 2, "built_for": "13.0", "computed": "works"}
    own = [{**gpu, "index": i, "uuid": f"u{i}"} for i in range(2)]
    assert levels(devices.judge(own)) == {OK}
    shared = [{**gpu, "index": 0, "uuid": "u0"}] * 2
    assert found(devices.judge(shared), "ranks 0, 1 share one GPU").level == ADVICE
    broken = [{**gpu, "index": 0, "uuid": "u0", "computed": "CUDA error: ECC"}]
    assert found(devices.judge(broken), "CUDA error: ECC").level == PROBLEM
    hidden = [{**gpu, "count": 0, "visible": "", "index": None, "computed": None}]
    assert found(devices.judge(hidden), "torch sees none").level == PROBLEM


# -- what ends the process -----------------------------------------------------------------------------------


def test_a_check_that_ends_the_process_is_named():
    def work(tell):
        tell("starting MPI")
        os.kill(os.getpid(), signal.SIGKILL)

    said = []
    assert supervise(work, 30, said.append) == 1
    assert said == ["starting MPI ended the process with signal 9"]


@pytest.mark.timed
def test_a_check_that_never_ends_is_killed():
    def work(tell):
        tell("memory")
        time.sleep(60)

    start, said = time.monotonic(), []
    assert supervise(work, 0.5, said.append) == 1
    assert time.monotonic() - start < 10
    assert said == ["memory did not finish within 0.5 s"]


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


@pytest.mark.parametrize("status", [0, 1])
def test_checks_that_end_return_their_status(status):
    said = []
    assert supervise(lambda tell: status, 30, said.append) == status
    assert said == []


def test_texts():
    assert listed([3]) == "rank 3"
    assert listed([0, 1, 2, 9]) == "ranks 0 to 2, 9"


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


def test_an_mpirun_without_a_home_is_told_what_it_lacks():
    said = "[vm:1] Error: Unable to get the user home directory\n  mca_base_var_init failed"
    facts = {"library": "Open MPI 5.0.11", "mpirun": "/bin/mpirun", "started": False, "said": said}
    assert found(mpi_library.judge_launcher(facts), "HOME is not set").remedy == "export HOME=~"


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


def test_memory_limits_are_those_of_the_jobs_control_group(tmp_path):
    """And of those around it; the root group has none, or the machine's."""
    groups = {
        "memory.max": "max",
        "slurm/memory.max": "9000",
        "slurm/job_7/memory.max": "4000",
        "other/memory.max": "1",
    }
    for name, text in groups.items():
        file = tmp_path / "fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert memory.memory_limit(tmp_path, "0::/slurm/job_7\n") == 4000
    assert memory.memory_limit(tmp_path, "0::/slurm\n") == 9000
    assert memory.memory_limit(tmp_path, "0::/\n") is None
    first_version = tmp_path / "fs/cgroup/memory/job_8/memory.limit_in_bytes"
    first_version.parent.mkdir(parents=True)
    first_version.write_text("5000\n")
    assert memory.memory_limit(tmp_path, "4:cpu:/\n5:memory:/job_8\n0::/slurm\n") == 5000


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
