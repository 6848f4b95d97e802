"""Every launcher is recognised, and each way to find the others without MPI works or fails clearly."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as td

import hpcdist
from hpcdist.cli.run import variables
from hpcdist.core import hooks
from hpcdist.launch import arrival, decision, environment, rendezvous, slurm_secret, slurm_step
from hpcdist.torch_bridge import registration
from tests.ports import free_port

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_NODELIST": "n[01-04]",
}
HYDRA = "mpiexec (hydra: MPICH, Intel MPI)"
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
PMIX, OTHER = "a launcher that speaks PMIx", "what set RANK and WORLD_SIZE"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("mpirun (Open MPI)", 1, 2, True)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (HYDRA, 1, 2, True)),
        (TORCHRUN, (OTHER, 3, 4, False)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, None),  # not c10d's contract without an address
        (STEP, ("srun", 0, 2, True)),
        ({**STEP, "SLURM_STEP_ID": ""}, ("srun", 0, 2, True)),
        ({k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"}, None),  # the batch script itself
        ({**STEP, **MPIRUN}, ("mpirun (Open MPI)", 5, 6, True)),
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2"}, ("srun", 0, 2, True)),  # srun --mpi=pmi2
        # mpirun in an allocation starts its ranks by srun, and says which it is
        ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, (HYDRA, 0, 2, True)),
        ({**FLUX, **PMI}, ("flux run", 1, 2, True)),  # flux sets PMI_* too, PALS does
        ({**FLUX, **PMI, "MPI_LOCALRANKID": "0"}, (HYDRA, 1, 2, True)),  # mpiexec in a job of flux
        ({"PALS_RANKID": "1", "PALS_SIZE": "2", **PMI}, ("mpiexec (PALS)", 1, 2, True)),
        ({"PALS_RANKID": "1", **PMI}, ("mpiexec (PALS)", 1, 2, True)),
        ({"PALS_RANKID": "0", **PMI, "MPI_LOCALRANKID": "1"}, (HYDRA, 1, 2, True)),  # mpiexec in a job of PALS
        ({"PALS_RANKID": "1", "PMIX_RANK": "1"}, ("mpiexec (PALS)", 1, environment.UNKNOWN, True)),  # Aurora
        ({"PMIX_RANK": "1"}, (PMIX, 1, environment.UNKNOWN, True)),  # Fugaku
        ({"PMIX_RANK": "3", "RANK": "3", "WORLD_SIZE": "4"}, (PMIX, 3, environment.UNKNOWN, True)),
        ({**STEP, "PMIX_RANK": "0"}, ("srun", 0, 2, True)),
        ({**MPIRUN, "PMIX_RANK": "5"}, ("mpirun (Open MPI)", 5, 6, True)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, ("jsrun", 1, 2, True)),
        ({**STEP, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, ("torchrun", 3, 4, False)),  # srun torchrun
        # mpirun --map-by ppr:1:node torchrun
        ({**MPIRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, ("torchrun", 3, 4, False)),
        # one task that starts processes of its own
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN}, (OTHER, 3, 4, False)),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, None),
    ],
)
def test_launchers(variables, expected):
    launch = environment.detect(variables)
    assert (launch and (launch.name, launch.rank, launch.size, launch.starts_mpi)) == expected


def test_several_processes_of_the_only_rank_of_a_launcher_that_does_not_say_the_size(environ):
    """The one whose RANK is the launcher's would take MPI's world of one for the world of all."""
    environ({"PMIX_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"})
    launch = decision.find_launch()
    decision.check_size(launch, 2)
    with pytest.raises(ValueError, match=r"started 1 rank, RANK and WORLD_SIZE say rank 0 of 2"):
        decision.check_size(launch, 1)


@pytest.mark.parametrize(
    ("exported", "size", "text"),
    [
        ({}, 4, ""),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 4, ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 4, "says rank 1 of 4, RANK and WORLD_SIZE say rank 1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, environment.UNKNOWN, "says rank 1, RANK and WORLD_SIZE say rank 0 of 2"),
    ],
)
def test_a_size_that_only_mpi_says(exported, size, text):
    launch = environment.detect({"PALS_RANKID": "1", **exported}, size)
    assert (launch.rank, launch.size, bool(launch.conflict)) == (1, size, bool(text))
    assert text in launch.conflict


EXPORTED = {"MASTER_ADDR": "nid000012", "MASTER_PORT": "29500"}  # what a job script exports beside RANK and WORLD_SIZE
PALS = {"PALS_RANKID": "1", "PALS_SIZE": "2"}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}
MPI_LAUNCHERS = {
    "srun": {**STEP, "SLURM_PROCID": "1"},  # NERSC, LUMI, OLCF
    HYDRA: {**PMI, "MPI_LOCALRANKID": "1"},
    "mpiexec (PALS)": {**PALS, **PMI},  # ALCF
    "flux run": FLUX,
    "jsrun": JSRUN,
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "mpirun (MVAPICH)": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
}


@pytest.fixture
def environ(monkeypatch):
    """Sets variables, and no other launcher's."""

    def set_only(given):
        for name in (*TORCHRUN, *STEP):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.mark.parametrize("name", MPI_LAUNCHERS)
def test_exported_variables_beside_a_launchers(name, environ):
    own = MPI_LAUNCHERS[name]
    agreeing = {**own, **EXPORTED, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    launch = environment.detect(agreeing)
    assert (launch.name, launch.rank, launch.size, launch.starts_mpi, launch.conflict) == (name, 1, 2, True, "")
    assert "agree with RANK and WORLD_SIZE" in launch.reason
    forced = environment.detect({**agreeing, "HPCDIST_RANKS_FROM": "env"})
    assert (forced.name, forced.starts_mpi, forced.reason) == (OTHER, False, "HPCDIST_RANKS_FROM=env")

    differing = {**agreeing, "WORLD_SIZE": "4"}
    launch = environment.detect(differing)
    assert f"{name} says rank 1 of 2, RANK and WORLD_SIZE say rank 1 of 4" in launch.conflict
    forced = environment.detect({**differing, "HPCDIST_RANKS_FROM": "mpi"})
    assert (forced.name, forced.size, forced.conflict) == (name, 2, "")
    environ(differing)
    for call in (hpcdist.init_process_group, decision.find_launch):
        with pytest.raises(ValueError, match=r"rank 1 of 4\. Unset RANK .* HPCDIST_RANKS_FROM=env"):
            call()
    assert not hpcdist.is_mpi_available()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HPCDIST_RANKS_FROM": "mpi"}, "no MPI launcher's variables are set"),
        ({"HPCDIST_RANKS_FROM": "env", **MPIRUN}, "not all of RANK, WORLD_SIZE and MASTER_ADDR are set"),
        ({"HPCDIST_RANKS_FROM": "env", "RANK": "0", "WORLD_SIZE": "1"}, "not all of RANK"),
        ({"HPCDIST_RANKS_FROM": "srun", **MPIRUN}, "HPCDIST_RANKS_FROM=srun: expected mpi"),
    ],
)
def test_a_choice_that_cannot_be_kept(variables, text):
    assert text in environment.detect(variables).conflict


@pytest.mark.parametrize(
    ("variables", "size", "works"),
    [
        ({}, -1, True),
        ({}, 2, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, -1, False),
        ({"WORLD_SIZE": "2"}, -1, False),  # exported in a job script, without srun
        (TORCHRUN, -1, False),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, -1, True),
        (MPIRUN, -1, True),
    ],
)
def test_mpi_needs_its_launcher(variables, size, works, environ):
    environ(variables)
    if works:
        decision.check_mpi(decision.find_launch(), size)
    else:
        with pytest.raises(hpcdist.DistBackendError, match="Start them with mpirun or srun"):
            decision.check_mpi(decision.find_launch(), size)


@pytest.mark.parametrize(
    ("variables", "world_size", "text"),
    [
        (MPIRUN, -1, r"mpirun \(Open MPI\) started 6 \(this is rank 5\)"),
        (TORCHRUN, -1, f"{OTHER} started 4"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, -1, "torchrun started 4"),
        ({}, 4, "world_size is 4"),
        (MPIRUN, 1, None),
        ({}, -1, None),
    ],
)
def test_loopback_is_the_whole_job(variables, world_size, text, environ):
    environ(variables)
    if text is None:
        hpcdist.init_process_group("loopback", world_size=world_size, bridge=False)
        hpcdist.destroy_process_group()
        return
    with pytest.raises(ValueError, match=text):
        hpcdist.init_process_group("loopback", world_size=world_size)
    assert not hpcdist.is_initialized()


def test_torchruns_variables(environ):
    """``run`` sets all of them, whatever the launcher says of nodes."""
    place = {"SLURM_NODEID": "1", "SLURM_LOCALID": "2", "SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7"}
    environ({**STEP, **place, "SLURM_STEP_NODELIST": "n[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4,3"})
    found = variables(environment.detect())
    assert found == {
        "RANK": 6,
        "WORLD_SIZE": 7,
        "LOCAL_RANK": 2,
        "LOCAL_WORLD_SIZE": 3,
        "GROUP_RANK": 1,
        "GROUP_WORLD_SIZE": 3,
        "ROLE_RANK": 6,
        "ROLE_WORLD_SIZE": 7,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "n07",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }


@pytest.mark.parametrize(("local_size", "address"), [("2", "rank0.invalid"), ("6", "127.0.0.1")])
def test_the_address_where_the_launcher_names_no_host(local_size, address, environ):
    environ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": local_size})
    assert variables(environment.detect())["MASTER_ADDR"] == address


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [(5, 1, 1), (5, 2, 1), (5, 0, None), (0, 0, 0), (3, 1, 1)],  # in blocks of 4, in turn on 2 nodes, neither
)
def test_the_number_of_a_node(rank, local_rank, expected):
    launch = environment.Launch("mpirun (Open MPI)", rank, 8, local_rank, True, "")
    assert environment.node_index(4, launch, {}) == expected
    assert environment.node_index(4, launch, {"PALS_NODEID": "7"}) == 7
    assert environment.node_index(3, launch, {}) is None


@pytest.mark.parametrize(("given", "is_on"), [("0", False), ("1", True)])
def test_a_switch_is_0_or_1(given, is_on, monkeypatch):
    monkeypatch.setenv(environment.REPRODUCIBLE, given)
    assert environment.is_on(environment.REPRODUCIBLE) is is_on
    monkeypatch.setenv(environment.REPRODUCIBLE, "exact")
    with pytest.raises(ValueError, match=r"HPCDIST_REPRODUCIBLE='exact': expected 0 or 1"):
        environment.is_on(environment.REPRODUCIBLE)


def test_what_the_program_has_chosen_goes_before_the_environment(monkeypatch):
    """A world of one process, for which nothing is compared."""
    monkeypatch.setattr(hooks, "reproducible", True)
    monkeypatch.setenv(environment.REPRODUCIBLE, "0")
    hpcdist.init_process_group("loopback", bridge=False)
    hpcdist.destroy_process_group()
    assert hooks.reproducible


def test_node_local_rank():
    assert environment.node_local_rank({}) is None
    assert environment.node_local_rank({"SLURM_LOCALID": "3"}) == 3
    assert environment.node_local_rank(FLUX) == 0
    assert environment.node_local_rank({"JSM_NAMESPACE_LOCAL_RANK": "2"}) == 2
    assert environment.node_local_rank({"LOCAL_RANK": "1", "SLURM_LOCALID": "3"}) == 1


def test_step_before_job():
    step = slurm_step.step(STEP)
    assert (step.rank, step.size, step.hosts, step.identity) == (0, 2, ["localhost"], "77.1.0")
    whole = slurm_step.step({k: v for k, v in STEP.items() if not k.startswith("SLURM_STEP_N")})
    assert (whole.size, whole.hosts) == (8, ["n01", "n02", "n03", "n04"])
    with pytest.raises(ValueError, match="SLURM_PROCID"):
        slurm_step.step({})


def test_two_jobs_on_one_node_find_their_own_store(monkeypatch, tmp_path, environ):
    environ({**STEP, "HOME": str(tmp_path)})
    limit = timedelta(seconds=20)
    first, *_ = next(iter(rendezvous.rendezvous("slurm://", timeout=limit)))
    # another job whose ports are the very same ones, as a hash may have it
    ports = []
    monkeypatch.setattr(rendezvous, "CANDIDATES", 3)
    real = rendezvous.serve_any

    def crowded(host, candidates, timeout, secret):
        ports.extend(candidates)
        return real(host, [first.port, *candidates], timeout, secret)

    monkeypatch.setattr(rendezvous, "serve_any", crowded)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    second, *_ = next(iter(rendezvous.rendezvous("slurm://", timeout=limit)))
    assert second.port != first.port
    monkeypatch.setenv("SLURM_PROCID", "1")
    places = [("127.0.0.1", first.port), ("127.0.0.1", second.port)]
    mine = rendezvous.join_any(places, limit, slurm_secret.secret("78.1.0", slurm_secret.key_of(["localhost"])))
    mine.set("key", "of job 78")
    assert second.get("key") == b"of job 78"
    assert not first.check(["key"])


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_two_processes_find_each_other(scheme, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    found = [None, None]

    def look(rank):
        found[rank] = next(
            iter(rendezvous.rendezvous(f"{url}?rank={rank}&world_size=2", timeout=timedelta(seconds=20)))
        )

    threads = [threading.Thread(target=look, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [each[1:] for each in found] == [(0, 2), (1, 2)]
    found[0][0].set("key", "value")
    assert found[1][0].get("key") == b"value"
    assert isinstance(found[0][0], td.Store)


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("smoke://x", RuntimeError, "known: env://"),
        (5, RuntimeError, "must be a string"),
        ("tcp://127.0.0.1:1?rank=0", ValueError, "world size"),
        ("tcp://127.0.0.1:1?world_size=2", ValueError, "rank parameter"),
        ("tcp://127.0.0.1?rank=0&world_size=2", ValueError, "port expected"),
        ("tcp://127.0.0.1:1?rank=2&world_size=2", ValueError, "out of range"),
        ("file://host/path?rank=0&world_size=2", ValueError, "absolute path"),
        ("env://", ValueError, "environment variable RANK expected"),
        ("slurm://", ValueError, "start every rank with srun"),
    ],
)
def test_what_is_missing_is_named(url, kind, text, environ):
    environ({})
    with pytest.raises(kind, match=text):
        next(iter(rendezvous.rendezvous(url)))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "environment variable MASTER_ADDR expected"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "environment variable RANK expected"),
        ({**TORCHRUN, "RANK": "one"}, "environment variable RANK is 'one', expected a number"),
        ({**TORCHRUN, "MASTER_PORT": "tcp"}, "environment variable MASTER_PORT is 'tcp', expected a number"),
    ],
)
def test_a_rank_of_several_does_not_become_a_world_of_its_own(variables, text, environ):
    environ(variables)
    with pytest.raises(ValueError, match=text):
        hpcdist.init_process_group()


def test_one_process_in_a_job_of_several_tasks_warns(environ, recwarn):
    """A job script, or the shell of an allocation, without srun."""
    environ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    with pytest.warns(UserWarning, match=r"in a job of 8 tasks \(SLURM_NTASKS\): start the ranks with srun"):
        hpcdist.init_process_group(bridge=False)
    hpcdist.destroy_process_group()
    recwarn.clear()
    hpcdist.init_process_group(rank=0, world_size=1, bridge=False)
    hpcdist.destroy_process_group()
    environ({"SLURM_NTASKS": "1"})
    hpcdist.init_process_group(bridge=False)
    hpcdist.destroy_process_group()
    assert not recwarn.list


@pytest.mark.parametrize("which", ["rank", "world_size"])
def test_a_url_that_contradicts_the_caller_is_refused(which):
    given = {"rank": 0, "world_size": 1, which: 7}
    with pytest.raises(ValueError, match=rf"{which}=7 was given, and the URL says {which}="):
        next(iter(rendezvous.rendezvous("tcp://127.0.0.1:1?rank=0&world_size=1", **given)))


def test_a_handler_of_ones_own(monkeypatch):
    monkeypatch.setattr(rendezvous, "HANDLERS", dict(rendezvous.HANDLERS))

    def handler(url, rank, world_size, **kwargs):
        yield td.HashStore(), 4, 5

    rendezvous.register_rendezvous_handler("own", handler)
    assert next(iter(rendezvous.rendezvous("own://")))[1:] == (4, 5)
    with pytest.raises(RuntimeError, match="already registered"):
        rendezvous.register_rendezvous_handler("own", handler)


@pytest.mark.parametrize("is_torchs", [False, True], ids=["ours", "torch's door"])
def test_rank_0_reports_that_it_waits_for_processes_that_nobody_started(is_torchs, monkeypatch, capfd):
    """In a job script that exports RANK and WORLD_SIZE, and has no srun."""
    monkeypatch.setattr(arrival, "SECONDS", 0.1)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    limit, launch = timedelta(seconds=1), environment.detect(variables)
    door = partial(rendezvous.find, launch, None, None, -1, -1, limit)
    if is_torchs:
        door = partial(next, registration.by_launcher("env://", is_ours=True, timeout=limit))
    with pytest.raises(RuntimeError):  # torch's or ours
        door()
    expected = "waited for 0 s: not all other processes have come to it. RANK and WORLD_SIZE say rank 0 of 2: if a"
    assert capfd.readouterr().err.count(expected) == 1
