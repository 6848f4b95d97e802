"""What is set in the environment before MPI starts, and what stays as the user chose it."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpcdist as dist
from hpcdist.backends.mpi.process import connection, open_mpi, runtime
from hpcdist.core import memory_file
from hpcdist.launch.environment import detect
from tests import forked, programs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({runtime.FAULT_TOLERANCE: "0"}, None),
        ({runtime.FAULT_TOLERANCE: "false"}, None),
        ({runtime.FAULT_TOLERANCE: "1"}, "-1"),
        ({runtime.FAULT_TOLERANCE: "true", runtime.COLLECTIVES: "^hcoll"}, "-1"),
        ({runtime.FAULT_TOLERANCE: "1", runtime.HAN_PRIORITY: "50"}, "50"),
        ({runtime.FAULT_TOLERANCE: "1", runtime.COLLECTIVES: "^hcoll,han"}, None),
        ({runtime.FAULT_TOLERANCE: "1", runtime.COLLECTIVES: "han,tuned,basic"}, None),
    ],
)
def test_coll_han_is_left_out_under_ulfm_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in (runtime.FAULT_TOLERANCE, runtime.COLLECTIVES, runtime.HAN_PRIORITY):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    runtime.leave_out_han()
    assert os.environ.get(runtime.HAN_PRIORITY) == expected


def test_what_needs_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.is_mpi_available()  # mpi4py has loaded its library, as it would on macOS
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(dist.DistBackendError, match="works on Linux only, and this is darwin: start ranks"):
        dist.init_process_group("mpi")
    with pytest.raises(dist.DistStoreError, match="and this is darwin"):
        dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5))
    dist.init_process_group()  # one process
    dist.destroy_process_group()


@pytest.mark.parametrize("owner", ["this", "another"])
@pytest.mark.parametrize(
    ("launcher", "is_child"),
    [("PMIx", True), ("PMIx of its own", False), ("PMI", True), ("closed PMI", True), ("PMI of its own", False)],
)
def test_a_child_of_a_rank_is_refused_unless_a_launcher_of_its_own_started_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, owner: str, is_child: bool
) -> None:
    for name in (connection.PROCESS, connection.NAMESPACE, connection.DESCRIPTOR):
        monkeypatch.delenv(name, raising=False)
    ends = socket.socketpair()
    with ends[0], ends[1]:
        if "PMIx" in launcher:
            monkeypatch.setenv(connection.NAMESPACE, "job-1")
        else:
            monkeypatch.setenv(connection.DESCRIPTOR, str(ends[0].fileno()))
        pid = os.getpid() if owner == "this" else os.getppid()
        monkeypatch.setenv(connection.PROCESS, f"{pid} {connection.identity()}")
        if launcher == "PMIx of its own":
            monkeypatch.setenv(connection.NAMESPACE, "job-2")
        elif launcher == "PMI of its own":
            monkeypatch.setenv(connection.DESCRIPTOR, str(ends[1].fileno()))
        elif launcher == "closed PMI":
            ends[0].close()
        if is_child and owner == "another":
            with pytest.raises(dist.DistBackendError, match=f"was started by process {pid} of an MPI job"):
                connection.check_process()
        else:
            connection.check_process()


ONE = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job"}
STEP = {"SLURM_STEP_ID": "0", "PMIX_NAMESPACE": "job"}
FLUX = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"SLURM_JOB_NUM_NODES": "2"}, True),  # a process alone in a batch script
        ({"PMIX_NAMESPACE": "job"}, False),
        (ONE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        (ONE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        (ONE, False),
        (ONE | STEP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_STEP_NUM_NODES": "1"}, False),  # mpirun in a step
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, True),
        (STEP | {"SLURM_STEP_NUM_NODES": "2"}, False),
        (STEP, False),
        (FLUX | {"FLUX_JOB_NNODES": "1"}, True),
        (FLUX | {"FLUX_JOB_NNODES": "4"}, False),
    ],
)
def test_launchers_say_whether_all_ranks_are_on_one_node(given: dict[str, str], expected: bool) -> None:
    assert open_mpi.is_on_one_node(given) is expected


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("site/etc/openmpi-mca-params.conf", "# btl = ^ofi\nbtl_base_warn_component_unused=0\nosc = ^ucx\n", False),
        ("site/etc/openmpi-mca-params.conf", "mtl = ^psm\n", True),
        ("lib/etc/openmpi-mca-params-override.conf", "a = 1\n  pml=ucx\n", True),
        ("home/.openmpi/mca-params.conf", "btl = self,sm,tcp", True),
    ],
)
def test_a_network_that_the_site_or_the_user_chose_stays(tmp_path: Path, file: str, text: str, expected: bool) -> None:
    given = {"HOME": str(tmp_path / "home"), "OPAL_PREFIX": str(tmp_path / "site")}
    library = str(tmp_path / "lib/lib/libmpi.so")
    assert not open_mpi.is_chosen(given, library)
    for name in open_mpi.CHOICES:
        assert open_mpi.is_chosen(given | {name: "x"}, library)
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert open_mpi.is_chosen(given, library) is expected


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        (None, "pml = ^ucx\n", True),
        (None, "btl = ^uct,openib,ofi\n", False),  # Debian's
        (None, "btl = self,vader\n", False),
        ("self,ofi", "", True),
        ("^tcp", "", True),
        ("^ofi", "", False),
        ("self,sm", "", False),
    ],
)
def test_whether_btl_ofi_is_opened(tmp_path: Path, variable: str | None, text: str, expected: bool) -> None:
    path = tmp_path / "etc/openmpi-mca-params.conf"
    path.parent.mkdir()
    path.write_text(text)
    given = {"OPAL_PREFIX": str(tmp_path), **({open_mpi.VARIABLE: variable} if variable else {})}
    assert open_mpi.opens_btl_ofi(given, None) is expected


@pytest.mark.parametrize("folder", ["openmpi", "openmpi/lib/openmpi3"])  # of its own installation, and Debian's
@pytest.mark.parametrize(
    ("components", "given", "version", "is_refused"),
    [
        (["ext3x", "isolated", "flux"], {}, (4, 1, 4), True),
        (["ext3x", "isolated", "flux"], {}, (5, 0, 11), False),
        (["ext3x", "isolated"], {connection.NAMESPACE: "slurm.pmix.3.0"}, (4, 1, 4), False),
        (["pmix3x", "s1", "s2"], {}, (4, 1, 4), False),  # built with Slurm's own PMI
        (["pmix3x", "flux", "cray"], {}, (4, 1, 4), False),
        ([], {}, (4, 1, 4), False),  # built without files of components: nothing is known
    ],
)
def test_an_open_mpi_4_that_srun_did_not_tell_of_its_ranks_is_refused_before_mpi_ends_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    components: list[str],
    given: dict[str, str],
    version: tuple[int, ...],
    is_refused: bool,
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for each in components:
        (tmp_path / folder / f"mca_pmix_{each}.so").touch()
    monkeypatch.setattr(runtime.libraries, "loaded_libraries", lambda: [str(tmp_path / "libmpi.so.40")])
    monkeypatch.delenv(runtime.PREFIX, raising=False)
    monkeypatch.delenv(connection.NAMESPACE, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    description = f"Open MPI v{'.'.join(map(str, version))}, package: Debian OpenMPI"
    library = SimpleNamespace(get_vendor=lambda: ("Open MPI", version), Get_library_version=lambda: description)
    launch = detect({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"})
    assert launch is not None
    if is_refused:
        with pytest.raises(
            dist.DistBackendError, match=r"by PMIx, and this launcher does not\. .*--mpi=pmix for Open MPI"
        ):
            runtime.check_launcher(library, launch)
    else:
        runtime.check_launcher(library, launch)
    assert runtime.may_connect(library, launch) is (not is_refused and (version < (5,) or bool(given)))


@pytest.mark.parametrize(
    ("vendor", "chosen", "expected"),
    [
        (("Open MPI", (5, 0, 11)), {}, {"OMPI_MCA_btl_sm_eager_limit": "32768"}),
        (("Open MPI", (4, 1, 4)), {}, {"OMPI_MCA_btl_vader_eager_limit": "32768"}),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_btl_sm_eager_limit": "4096"}, {"OMPI_MCA_btl_sm_eager_limit": "4096"}),
        (("MPICH", (5, 0, 2)), {}, {}),
    ],
    ids=["Open MPI 5", "Open MPI 4", "the user's", "MPICH"],
)
def test_open_mpi_copies_small_messages_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
    vendor: tuple[str, tuple[int, ...]],
    chosen: dict[str, str],
    expected: dict[str, str],
) -> None:
    monkeypatch.setattr(os, "environ", dict(chosen))
    open_mpi.copy_small_messages(SimpleNamespace(get_vendor=lambda: vendor))
    assert os.environ == expected


START_MPI = """
import os
from hpcdist.backends.mpi.process import connection, open_mpi, runtime
MPI = runtime.load()
with open_mpi.without_btl_ofi(MPI):
    MPI.Init_thread()
print("left:", os.environ.get(open_mpi.VARIABLE))
"""


@pytest.mark.skipif(programs.LIBRARY != "openmpi", reason="a component of Open MPI")
def test_open_mpi_does_not_open_btl_ofi_on_one_node() -> None:
    program = [*forked.python(), "-c", START_MPI]
    verbose = {"OMPI_MCA_btl_base_verbose": "20"}
    for given, is_open in (({}, False), ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, True)):
        done = programs.run(program, **verbose, **given)
        assert done.stdout == "left: None\n", done.stderr
        assert ("initializing btl component sm" in done.stderr, "btl component ofi" in done.stderr) == (True, is_open)


@pytest.mark.skipif(programs.LIBRARY == "none", reason="no mpirun")
@pytest.mark.parametrize(
    ("name", "free", "rank", "warns"),
    [
        ("MPICH", 1 << 20, "1", True),
        ("MPICH", 2 << 20, "1", False),
        ("MPICH", None, "1", False),  # no /dev/shm
        ("MPICH", memory_file.UNLIMITED, "1", False),
        ("MPICH", 0, "1", True),  # full
        ("MPICH", 1 << 19, None, True),  # no launcher
        ("Open MPI", 1, "1", False),
    ],
)
def test_mpich_without_room_in_dev_shm_is_named_before_it_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str, free: int | None, rank: str | None, warns: bool
) -> None:
    monkeypatch.setattr(memory_file, "free_bytes", lambda: free)
    launch = rank and detect({"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank})
    mpi = SimpleNamespace(get_vendor=lambda: (name, (5, 0, 2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.warn_of_little_memory(mpi, launch)
    assert ["else MPICH may end in MPI_Init by SIGBUS" in str(each.message) for each in caught] == [True] * warns


def test_mpi_starts_without_a_home() -> None:
    start = "from hpcdist.backends.mpi.process import runtime; runtime.world(); print('started')"
    done = programs.run(["env", "-u", "HOME", *forked.python(), "-c", start])
    assert done.stdout == "started\n", done.stderr


def test_another_module_named_mpi4py_before_the_real_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").touch()
    start = "import hpcdist; hpcdist.init_process_group('mpi')"
    done = programs.run([*forked.python(), "-c", start], folder=tmp_path)
    said = f"backend 'mpi' cannot be loaded: cannot import name 'rc' from 'mpi4py' ({tmp_path}/mpi4py.py)"
    assert said in done.stderr


def test_a_world_of_one_where_the_launcher_says_only_the_rank() -> None:
    library = SimpleNamespace(
        Get_library_version=lambda: "MPICH Version: 4.0.2", COMM_WORLD=SimpleNamespace(Get_size=lambda: 1)
    )
    runtime.check_world(library, detect({"PMIX_RANK": "0"}))  # it may be the only one
    with pytest.raises(dist.DistBackendError, match=r"as rank 1, but the MPI library .* unset PMIX_RANK, which"):
        runtime.check_world(library, detect({"PMIX_RANK": "1"}))


@pytest.mark.parametrize("variable", connection.PMIX)
def test_variables_of_pmix_with_which_mpich_would_end_the_process(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, as a shell may have kept it; not beside the descriptor of MPICH's own launcher."""
    for name in (*connection.PMIX, connection.DESCRIPTOR):
        monkeypatch.delenv(name, raising=False)
    library = SimpleNamespace(
        Get_library_version=lambda: "MPICH Version: 5.0.2", get_vendor=lambda: ("MPICH", (5, 0, 2))
    )
    runtime.check_launcher(library, None)
    monkeypatch.setenv(variable, "0")
    with pytest.raises(dist.DistBackendError, match=r"in MPI_Init: .* unset PMIX_NAMESPACE and PMIX_RANK, which are"):
        runtime.check_launcher(library, detect({"PMIX_RANK": "0"}))
    ends = socket.socketpair()
    with ends[0], ends[1]:
        monkeypatch.setenv(connection.DESCRIPTOR, str(ends[0].fileno()))
        runtime.check_launcher(library, None)


MPICH = SimpleNamespace(Get_library_version=lambda: "MPICH Version: 5.0.2", get_vendor=lambda: ("MPICH", (5, 0, 2)))
TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("closed_by", ["this process", "the launcher", "a file in its place"])
def test_a_connection_that_is_closed(monkeypatch: pytest.MonkeyPatch, closed_by: str, tmp_path: Path) -> None:
    """MPI_Init would end this process, if need be after writing into the file: a rank is told, one process goes on."""
    for name in (*connection.PMIX, connection.FOLDER):
        monkeypatch.delenv(name, raising=False)
    ends = socket.socketpair()
    with ends[0], ends[1], (tmp_path / "file").open("w") as file:
        given = {"PMI_FD": str(ends[0].fileno()), "PMI_RANK": "0", "PMI_SIZE": "2", **TASK}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        two = detect(given | {"SLURM_STEP_NUM_TASKS": "2"})
        one = detect(given | {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"})
        runtime.check_launcher(MPICH, two)
        if closed_by == "a file in its place":
            monkeypatch.setenv("PMI_FD", str(file.fileno()))
        else:
            ends[closed_by == "the launcher"].close()
        with pytest.raises(dist.DistBackendError, match=r"srun started 2 ranks .* no open connection"):
            runtime.check_launcher(MPICH, two)
        assert two is not None
        assert not runtime.may_connect(MPICH, two)
        runtime.check_launcher(MPICH, one)
        assert os.environ.keys().isdisjoint(connection.PMI)


def test_variables_of_a_pmix_server_that_has_ended_are_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of one whose folder a container does not show, while it listens."""
    library = SimpleNamespace(get_vendor=lambda: ("Open MPI", (5, 0, 11)), Get_library_version=lambda: "Open MPI")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"pmix-server.1;tcp4://127.0.0.1:{server.getsockname()[1]}"
        left = {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "0", "PMIX_SERVER_URI41": address}
        for name, value in left.items():
            monkeypatch.setenv(name, value)
        for folder, is_there in ((tmp_path, True), (tmp_path / "gone", True)):
            monkeypatch.setenv(connection.FOLDER, str(folder))
            runtime.check_launcher(library, None)
            assert ("PMIX_NAMESPACE" in os.environ) is is_there
    runtime.check_launcher(library, None)
    assert os.environ.keys().isdisjoint(connection.PMIX)
