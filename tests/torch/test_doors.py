"""Three doors take the same decisions, whoever set which variable: ``import hpcdist``, torch's "hpcdist", ``run``."""

import re
import sys
import textwrap

import pytest

from tests import forked, programs
from tests.ports import free_port

pytestmark = pytest.mark.timeout(400)  # up to three programs a test

RUN = ["-m", "hpcdist", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
STRINGS = [
    "none",
    "mpi",
    "cpu:mpi",
    "cpu:mpi,cuda:nccl",
    "gloo",
    "cpu:gloo",
    "cpu:gloo,cuda:nccl",
    "cuda:nccl,cpu:gloo",
]

# prints a line for each backend that is asked for: what was made of it, and how many warnings named the missing GPU
EACH = """
    import os, sys, warnings
    import torch, torch.distributed as dist

    door, *asked = sys.argv[1:]
    if door == "import":
        import hpcdist as dist
    for each in asked:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                dist.init_process_group(*([] if each == "none" else [each]))
            except (ValueError, RuntimeError) as error:
                said = f"{type(error).__name__} {error}"
            else:
                total = torch.ones(1)
                dist.all_reduce(total)
                kinds = {type(each).__name__ for each in getattr(dist.group.WORLD, "backends", {}).values()}
                said = f"{dist.get_world_size()} {int(total)} {','.join(kinds) or 'stock'} {dist.get_backend()}"
                if door == "run":
                    said += " " + type(dist.new_group(backend="cpu:gloo").backends["cpu"]).__name__
                dist.barrier()
                dist.destroy_process_group()
        missing = sum("no CUDA device" in str(warning.message) for warning in seen)
        os.write(1, f"{each}: {said} {missing}\\n".encode())
"""
# what job scripts export for torch beside the launcher's variables; the address is nobody's
EXPORT = "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=2 MASTER_ADDR=placeholder MASTER_PORT=1 exec "


def started(tmp_path, script, *command, **given):
    """Start a script by a shell's command line, in which SCRIPT stands for it, and return its process and lines."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    line = " ".join(map(str, command)).replace("SCRIPT", str(path))
    done = programs.run(["bash", "-c", line], timeout=110, **given)
    # gloo of torch before 2.9 prints "[Gloo] Rank 0 is connected to …"
    return done, sorted(line for line in done.stdout.splitlines() if line and not line.startswith("[Gloo]"))


def under_mpirun(command, exported=EXPORT, python=None):
    """Return a shell's command line that starts a command on two ranks with variables that each rank exports.

    Python is forked unless it is given: its own start is in the tests that start no mpirun.
    """
    options = ["--oversubscribe"] if programs.LIBRARY == "openmpi" else []
    return [programs.MPIRUN, *options, "-n 2", f"bash -c '{exported}{python or ' '.join(forked.python())} {command}'"]


def test_exported_variables_and_run(tmp_path):
    _, lines = started(tmp_path, EACH, *under_mpirun(" ".join([*RUN, "SCRIPT", "run", *STRINGS, "hpcdist"])))
    shown = {each: each if each != "none" else "hpcdist" for each in [*STRINGS, "hpcdist"]}
    expected = [f"{each}: 2 2 MPIBackend {shown[each]} MPIBackend {int('cuda' in each)}" for each in shown]
    assert lines == sorted(expected * 2)


def test_exported_variables_and_the_import(tmp_path):
    _, lines = started(tmp_path, EACH, *under_mpirun(" ".join(["SCRIPT import", *STRINGS, "loopback"])))
    refused = [line for line in lines if line.startswith("loopback: ValueError")]
    assert len(refused) == 2
    assert all("started 2" in line for line in refused)
    kinds = {each: "GlooBackend" if "gloo" in each else "MPIBackend" for each in STRINGS}
    shown = {each: each if each != "none" else "mpi" for each in STRINGS}
    expected = [f"{each}: 2 2 {kinds[each]} {shown[each]} {int('cuda' in each)}" for each in STRINGS]
    assert sorted(set(lines) - set(refused)) == sorted(expected)


BESIDE = """
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=asked_port)
    dist.init_process_group("gloo")
    for each in beside:
        everyone = dist.new_group(backend=each)
        last = dist.new_group([1], backend=each)
        total = torch.ones(1)
        dist.all_reduce(total, group=everyone)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(3), group=last)
        kind = type(everyone.backends["cpu"]).__name__
        default = type(dist.group.WORLD).__module__
        os.write(1, f"beside {default} {each}: {int(total)} {kind} {dist.get_backend(everyone)}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    assert not __import__("hpcdist").is_initialized()
"""


def test_exported_variables_and_torchs_door(tmp_path):
    """Also groups over MPI beside a default group that is torch's own, in a program that does not import hpcdist."""
    asked = ["mpi", "cpu:mpi", "hpcdist", "cuda:nccl,cpu:hpcdist"]
    beside = ["mpi", "cpu:mpi", "hpcdist"]
    names = f"    beside = {beside}\n    asked_port = '{free_port()}'\n"
    _, lines = started(tmp_path, EACH + names + BESIDE, *under_mpirun(" ".join(["SCRIPT torch", *asked])))
    stock = "torch.distributed.distributed_c10d"
    expected = [f"{each}: 2 2 MPIBackend {each} {int('cuda' in each)}" for each in asked]
    expected += [f"beside {stock} {each}: 2 MPIBackend {each}" for each in beside]
    assert lines == sorted(expected * 2)


BY_MPI4PY = """
    import os, sys
    from mpi4py import MPI

    # a port for each way: a rank may be at the next one before rank 0 has closed the store of torch's own at the last
    door, path, first, second, third = sys.argv[1:]
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=world.bcast("127.0.0.1"), MASTER_PORT=first)
    if door == "import":
        import hpcdist as dist
    else:
        import torch.distributed as dist
    import torch

    asked = {"import": None, "torch": "hpcdist", "run": "gloo"}[door]
    by_hand = {"rank": rank, "world_size": size}
    ways = {
        "variables": {},
        "env": {"init_method": "env://"},
        "file": {"init_method": f"file://{path}/met", **by_hand},
        "tcp": {"init_method": f"tcp://127.0.0.1:{second}", **by_hand},
        "query": {"init_method": f"tcp://127.0.0.1:{third}?rank={rank}&world_size={size}"},
    }
    for way, given in ways.items():
        dist.init_process_group(asked, **given)
        total = torch.ones(1)
        dist.all_reduce(total)
        kind = type(dist.group.WORLD.backends["cpu"]).__name__
        os.write(1, f"{way} {dist.get_rank() == rank} {dist.get_world_size()} {int(total)} {kind}\\n".encode())
        dist.barrier()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("door", ["import", "torch", "run"])
def test_ranks_that_a_script_takes_from_mpi4py(tmp_path, door):
    """OLCF's and ALCF's recipe, and what writes the way to meet by hand: all are MPI, by each door."""
    run = " ".join(RUN) if door == "run" else ""
    ports = f"{free_port()} {free_port()} {free_port()}"
    done, lines = started(tmp_path, BY_MPI4PY, *under_mpirun(f"{run} SCRIPT {door} {tmp_path} {ports}", "exec "))
    ways = ["env", "file", "query", "tcp", "variables"]
    assert lines == [f"{way} True 2 2 MPIBackend" for way in ways for _ in range(2)], done.stderr


ASKS = """
    import os
    import torch.distributed as dist

    dist.init_process_group("mpi" if dist.is_mpi_available() else "gloo")
    os.write(1, f"{dist.get_backend()} {dist.get_world_size()}\\n".encode())
    dist.destroy_process_group()
"""


PAIRS = """
    import os
    import torch
    import torch.distributed as dist

    given = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    compiled = torch.compile(lambda x: x + dist.is_mpi_available(), backend="eager", fullgraph=True)
    asked = bool(compiled(torch.zeros(1))) and dist.is_mpi_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:mpi", **given)  # torch's own group: MPI is not the CPU's
    except RuntimeError as error:
        os.write(1, f"{asked} {str(error).partition(' MPI is only')[0]}\\n".encode())
"""


def test_a_script_that_asks_torch_whether_there_is_mpi(tmp_path):
    """Fugaku's recipe, which does not import hpcdist: true where an MPI launcher has started several ranks."""
    done, lines = started(tmp_path, ASKS, *under_mpirun("SCRIPT", python=sys.executable))
    assert lines == ["mpi 2"] * 2, done.stderr
    one = f"RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} {sys.executable} SCRIPT"
    done, lines = started(tmp_path, PAIRS, *under_mpirun("SCRIPT", python=sys.executable))
    assert lines == ["True Distributed package doesn't have MPI built in."] * 2, done.stderr
    for command in ([one], [*TORCHRUN, "SCRIPT"]):
        done, lines = started(tmp_path, ASKS, *command)
        assert {line.split()[0] for line in lines} == {"gloo"}, done.stderr


BY_HAND = """
    import os, sys
    import torch
    import hpcdist as dist

    path, *ports = sys.argv[1:]
    by_hand = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    for backend in (None, "gloo"):
        for url in (f"tcp://127.0.0.1:{ports.pop()}", f"file://{path}/{backend}"):
            dist.init_process_group(backend, url, **by_hand)
            dist.all_reduce(total := torch.ones(1))
            kind = type(dist.group.WORLD.backends["cpu"]).__name__
            os.write(1, f"{backend} {url[:4]} {dist.get_world_size()} {int(total)} {kind}\\n".encode())
            dist.barrier()
            dist.destroy_process_group()
"""


def test_ranks_that_a_script_takes_from_the_launchers_variables(tmp_path):
    """fairseq's, submitit's and the Alliance's recipe; "gloo" stays what it says."""
    done, lines = started(tmp_path, BY_HAND, *under_mpirun(f"SCRIPT {tmp_path} {free_port()} {free_port()}"))
    expected = [f"None {way} 2 2 MPIBackend" for way in ("file", "tcp:")]
    expected += [f"gloo {way} 2 2 GlooBackend" for way in ("file", "tcp:")]
    assert lines == sorted(expected * 2), done.stderr


STOCK = """
    import os, sys
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo")  # without an address: torch's error, and no start of MPI
        dist.barrier()
    except Exception as error:
        os.write(1, f"{'mpi4py.MPI' in sys.modules} {type(error).__name__}\\n".encode())
"""


@pytest.mark.skipif(programs.LIBRARY != "openmpi", reason="its launcher speaks PMIx")
@pytest.mark.parametrize("variable", ["PALS_RANKID", "PMIX_RANK"])
def test_a_launcher_that_does_not_say_the_size(tmp_path, variable):
    """Aurora's and Fugaku's mpiexec: PMIx has no variable of the size. No door makes worlds of one, or takes gloo."""
    only = f"export {variable}=$OMPI_COMM_WORLD_RANK; for each in ${{!OMPI_@}}; do unset $each; done; "
    exported = f"{only} export RANK=${variable} WORLD_SIZE=2 MASTER_ADDR=placeholder MASTER_PORT=1; exec "
    for command, expected in {
        "SCRIPT import none mpi": ["mpi: 2 2 MPIBackend mpi 0", "none: 2 2 MPIBackend mpi 0"],
        "SCRIPT torch mpi hpcdist": ["hpcdist: 2 2 MPIBackend hpcdist 0", "mpi: 2 2 MPIBackend mpi 0"],
        " ".join([*RUN, "SCRIPT run gloo"]): ["gloo: 2 2 MPIBackend gloo MPIBackend 0"],
    }.items():
        for each in (only, exported):
            done, lines = started(tmp_path, EACH, *under_mpirun(command, each))
            assert lines == [line for line in expected for _ in range(2)], done.stderr
    done, lines = started(tmp_path, STOCK, *under_mpirun("SCRIPT", f"{only} exec ", python=sys.executable))
    assert lines == ["False ValueError"] * 2, done.stderr
    wrong = exported.replace("WORLD_SIZE=2", "WORLD_SIZE=1")
    _, lines = started(tmp_path, EACH, *under_mpirun("SCRIPT import none", wrong))
    assert ["of 2, RANK and WORLD_SIZE say rank" in line for line in lines] == [True, True]


GIVEN = """
    import os, re
    import torch.distributed as dist

    for rank, size in ((0, 4), (3, 2)):
        try:
            dist.init_process_group("gloo", rank=rank, world_size=size)
        except ValueError as error:
            os.write(1, re.search("given rank . of .", str(error))[0].encode() + b"\\n")
"""


def test_variables_that_contradict_the_launcher(tmp_path):
    exported = "RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 exec "
    _, lines = started(tmp_path, EACH, *under_mpirun("SCRIPT torch hpcdist mpi", exported))
    said = re.compile(r"ValueError .* says rank [01] of 2, RANK and WORLD_SIZE say rank 0 of 4")
    assert len(lines) == 4
    assert all(map(said.search, lines))
    done, lines = started(tmp_path, GIVEN, *under_mpirun(" ".join([*RUN, "SCRIPT"]), "exec "))
    assert lines == ["given rank 0 of 4", "given rank 0 of 4", "given rank 3 of 2", "given rank 3 of 2"], done.stderr
    done, _ = started(tmp_path, EACH, *under_mpirun(" ".join([*RUN, "SCRIPT run gloo"]), exported))
    assert done.returncode == 2
    assert "RANK and WORLD_SIZE say rank 0 of 4" in done.stderr
    # left over from a shell in which torchrun had started something
    leftover = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 TORCHELASTIC_RUN_ID=none exec "
    _, lines = started(tmp_path, EACH, *under_mpirun("SCRIPT import none", leftover))
    assert [re.sub(r"rank [01] of 2", "rank R of 2", line).count("says rank R of 2, RANK and") for line in lines] == [
        1,
        1,
    ]


def test_variables_that_say_nothing_by_themselves(tmp_path):
    exported = "WORLD_SIZE=4 LOCAL_RANK=7 SLURM_JOB_ID=1 SLURM_PROCID=5 exec "
    _, lines = started(tmp_path, EACH, *under_mpirun(" ".join([*RUN, "SCRIPT run gloo"]), exported))
    assert lines == ["gloo: 2 2 MPIBackend gloo MPIBackend 0"] * 2


def test_torchrun_and_mpi(tmp_path):
    """No door makes a world of one in each of torchrun's processes."""
    refused = "DistBackendError backend 'mpi': torchrun started this process, one of 2"
    for command in ["SCRIPT torch mpi", "SCRIPT import mpi cpu:mpi"]:
        _, lines = started(tmp_path, EACH, *TORCHRUN, command)
        assert len(lines) == 2 * len(command.split()[2:])
        assert all(refused in line for line in lines)
    _, lines = started(tmp_path, EACH, *TORCHRUN, *RUN, "SCRIPT run mpi gloo")
    assert [refused in line for line in lines] == [False, False, True, True]
    assert lines[:2] == ["gloo: 2 2 GlooBackend gloo GlooBackend 0"] * 2


FORKED = """
    import os, sys
    import torch, torch.distributed as dist

    first, second = sys.argv[1:]
    for url in (f"tcp://127.0.0.1:{first}", "env://"):
        if url == "env://":  # not before: an address alone is a launcher's too
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=second)
        children = []
        for rank in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
                total = torch.ones(1)
                dist.all_reduce(total)
                dist.barrier()
                os.write(1, f"{url[:3]} {dist.get_rank()} {dist.get_world_size()} {int(total)}\\n".encode())
                dist.destroy_process_group()
                os._exit(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert "LOCAL_RANK" not in os.environ  # by which Lightning tells that its processes have been started
    dist.init_process_group("gloo")
    os.write(1, f"alone {dist.get_world_size()}\\n".encode())
"""


def test_processes_that_a_script_starts_itself(tmp_path):
    done, lines = started(tmp_path, FORKED, sys.executable, *RUN, "SCRIPT", free_port(), free_port())
    assert lines == ["alone 1", "env 0 2 2", "env 1 2 2", "tcp 0 2 2", "tcp 1 2 2"], done.stderr


WITH_CHILD = """
    import os, subprocess, sys
    import torch, torch.distributed as dist

    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:  # as Lightning does, whose other processes are not started by run
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], WORLD_SIZE="2")
        child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    dist.init_process_group("gloo", rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"{dist.get_rank()} of {dist.get_world_size()} {int(total)}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    assert rank or child.wait(60) == 0
"""


def test_a_process_that_a_script_starts_without_run(tmp_path):
    done, lines = started(tmp_path, WITH_CHILD, sys.executable, *RUN, "SCRIPT", free_port())
    assert lines == ["0 of 2 2", "1 of 2 2"], done.stderr


def test_processes_that_a_user_starts(tmp_path):
    """Each with RANK and WORLD_SIZE of its own; "mpi" cannot connect them."""
    given = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} {sys.executable} {' '.join(RUN)}"
    both = f"RANK=0 {given} SCRIPT run gloo mpi & RANK=1 {given} SCRIPT run gloo mpi & wait"
    _, lines = started(tmp_path, EACH, both)
    assert lines[:2] == ["gloo: 2 2 GlooBackend gloo GlooBackend 0"] * 2
    assert [line.split()[:4] for line in lines[2:]] == [["mpi:", "DistBackendError", "backend", "'mpi':"]] * 2


LATE = """
    import os, subprocess, sys, time
    from mpi4py import MPI
    import hpcdist
    from hpcdist.launch import arrival

    arrival.SECONDS, report, reported = 1.0, arrival.report, sys.argv[1]

    def report_and_say_so(*args):
        report(*args)
        open(reported, "w")

    if MPI.COMM_WORLD.Get_rank() == 0:
        arrival.report = report_and_say_so
    else:
        while not os.path.exists(reported):
            time.sleep(0.05)
        # by its process: another job may run on this machine
        command = [sys.executable, "-m", "hpcdist", "debug", "--once", "--pid", str(os.getpid())]
        seen = subprocess.run(command, capture_output=True, text=True)
        os.write(1, (seen.stdout + seen.stderr).encode())
    hpcdist.init_process_group()
    hpcdist.barrier()
    os.write(1, b"all\\n")
"""


def test_a_rank_that_does_not_come_is_named(tmp_path):
    # not forked: the ranks of a node are read from the environments with which its processes started
    done, lines = started(tmp_path, LATE, *under_mpirun(f"SCRIPT {tmp_path}/reported", "exec ", sys.executable))
    said = r"\[rank 0 of 2\] init_process_group has waited .* rank 1 of this node \(process \d+\) has not come"
    assert len(re.findall(said, done.stderr)) == 1, done.stderr
    assert any(re.search(r"process \d+, rank 0 of 2, is in init_process_group", line) for line in lines), lines
    assert lines.count("all") == 2


ENDS_THAT_RAISE = """
    import torch.distributed as dist, hpcdist

    def fail():
        raise RuntimeError("not freed")

    for kept in ((), (0,), (1, 3)):
        hpcdist.init_process_group()
        groups = [dist.new_group(), dist.new_group(), dist.new_group(), dist.group.WORLD]
        for index in kept:
            groups[index].backends["cpu"].close = fail
        for end in (groups[0], None):
            try:
                dist.destroy_process_group(end)
            except RuntimeError as error:
                print(end is None, error)
            assert groups[0].is_aborted()
        assert all(group.is_aborted() for group in groups)
        assert not dist.is_initialized() and not hpcdist.is_initialized()
"""


def test_torch_forgets_groups_whose_end_raises(tmp_path):
    done, lines = started(tmp_path, ENDS_THAT_RAISE, sys.executable, "SCRIPT")
    assert (done.returncode, lines) == (0, ["False not freed", "True not freed"]), done.stderr
