"""Unmodified scripts, other worlds and torch's own init_process_group with hpcdist, each in its own processes."""

import os
import py_compile
import re
import sys
import textwrap
import zipfile

import pytest

from tests import forked, programs
from tests.ports import free_port
from tests.programs import ROOT

RUN = ["-c", "import sys; from hpcdist.cli.run import run; sys.exit(run(sys.argv[1:]))"]  # python -m hpcdist run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(tmp_path, launcher, script, *arguments, before=(), is_forked=False, **given):
    """Start a script and return what it prints, sorted by line; forked if the start of Python plays no part."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    python = forked.python() if is_forked else [sys.executable]
    starts = {"mpirun": programs.mpirun_command(2, [], python=python), "torchrun": TORCHRUN, "alone": python}
    command = [*starts[launcher], *before, str(path), *arguments]
    done = programs.run(command, timeout=90, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


@pytest.fixture
def installed(tmp_path):
    """What ``pip install`` says of the package in an environment: its entry points, as pyproject.toml has them."""
    pattern = r'^\[project\.entry-points\."(.+)"\]\n((?:\w+ = ".+"\n)+)'
    groups = re.findall(pattern, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folder = tmp_path / "site" / "hpcdist-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcdist\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("".join(f"[{name}]\n{lines}".replace('"', "") for name, lines in groups))
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder.parent)])}


TRAIN = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(sys.argv[1])
    tensor = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    group = dist.new_group([0])
    everyone = dist.new_group(backend="gloo")
    dist.barrier(group=everyone)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(tensor).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(2))
    names = {event.name for event in profiler.events() if event.name.endswith(":all_reduce")}
    assert names == {dist.get_backend() + ":all_reduce"} or dist.get_backend() not in ("gloo", "mpi"), names
    who = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]
    names = {pair.partition(":")[2] for pair in dist.get_backend_config().split(",")}
    assert names == {dist.get_backend()} or ":" in dist.get_backend(), dist.get_backend_config()
    logged = model._get_ddp_logging_data()["backend_name"]
    assert logged == {"mpi": "mpi"}.get(dist.get_backend(), "hpcdist"), logged  # "gloo" would be looked into in C++
    line = [*who, int(tensor[0]), type(dist.group.WORLD).__module__]
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())
    dist.destroy_process_group()
    assert not dist.is_initialized()
"""
OURS = "hpcdist.core.process_group"
BOTH = "cpu:hpcdist,cuda:nccl"
IMPORT = "\nimport hpcdist.torch_bridge\n"


@pytest.mark.parametrize(
    ("door", "launcher", "backend"),
    [
        ("import", "mpirun", "hpcdist"),
        ("import", "torchrun", "hpcdist"),
        ("import", "mpirun", BOTH),
        ("run", "mpirun", "mpi"),
        ("run", "mpirun", "gloo"),
        ("run", "alone", "mpi"),
        ("installation", "mpirun", "hpcdist"),
        ("installation", "torchrun", BOTH),
    ],
)
def test_a_script_of_torchs(tmp_path, installed, door, launcher, backend):
    """It imports hpcdist, or is started by ``hpcdist run``, or finds it installed; no address is given."""
    script = IMPORT * (door == "import") + textwrap.dedent(TRAIN)
    before, given = RUN * (door == "run"), installed if door == "installation" else {}
    lines = run(tmp_path, launcher, script, backend, before=before, **given)
    size = 1 if launcher == "alone" else 2
    assert lines == [f"{rank} {size} {backend} {size * (size + 1) // 2} {OURS}" for rank in range(size)]


def test_gloo_stays_gloo_without_run(tmp_path):
    script = """
        import os, hpcdist, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        os.write(1, f"{dist.get_backend()} {type(dist.group.WORLD).__module__} {hpcdist.is_initialized()}\\n".encode())
    """
    lines = run(tmp_path, "torchrun", script)
    assert lines == ["gloo torch.distributed.distributed_c10d False"] * 2


def test_nan_is_found_in_calls_of_an_unmodified_script(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    script = """
        import os, torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        try:
            dist.all_reduce(torch.tensor([1.0, float("nan")]))
        except RuntimeError as error:
            os.write(1, f"{str(error)[:36]}\\n".encode())
    """
    assert run(tmp_path, "alone", script, before=RUN, is_forked=True) == ["NaN in what rank 0 was about to send"]


def test_groups_have_the_name_that_the_script_asked_for(tmp_path):
    """A ShardedTensor of a rank without a shard looks for a GPU if the group of CPU tensors is not named "gloo"."""
    script = """
        import os
        import torch
        import torch.distributed as dist
        from torch.distributed._shard import sharded_tensor, sharding_spec
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        groups = [dist.group.WORLD, dist.new_group([0, 1]), *mesh.get_all_groups()]
        names = {name for group in groups for name in (group.name(), dist.get_backend(group), group.asked_name)}
        groups.append(dist.group.WORLD.split_group([0, 1]))
        names |= {groups[-1].name(), groups[-1].get_backend(torch.device("cpu")).name()}
        on_rank_0 = sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu"])
        device = sharded_tensor.zeros(on_rank_0, 4, 4).device
        os.write(1, f"{dist.get_rank()} {device} {len(groups)} {names}\\n".encode())
    """
    lines = run(tmp_path, "mpirun", script, before=RUN, is_forked=True)
    assert lines == [f"{rank} cpu 5 {{'gloo'}}" for rank in range(2)]


MAIN = """
import atexit, pickle, sys, threading

class Mine:
    pass

def late(who):
    print(who, pickle.loads(pickle.dumps(Mine())).__class__ is Mine, sys.modules["__main__"].__dict__ is globals())

sys.excepthook = lambda *_: late("hook")
print(sys.modules.get("__mp_main__", sys.modules["__main__"]) is sys.modules["__main__"])
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path[0], sys.path.count(sys.path[0]))
print(sorted(name for name in globals() if not name.startswith("__")))
atexit.register(late, "exit function")
threading.Thread(target=lambda: threading.main_thread().join() or late("thread")).start()
raise ValueError
"""


@pytest.mark.parametrize("door", ["file", "link", "compiled", "folder", "archive", "module", "package"])
def test_a_script_is_the_main_program_as_python_itself_runs_it(tmp_path, door):
    (tmp_path / "package").mkdir()
    for name in ("script.py", "__main__.py", "package/__main__.py"):
        (tmp_path / name).write_text(MAIN)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.write(tmp_path / "__main__.py", "__main__.py")
    (tmp_path / "package" / "link.py").symlink_to(tmp_path / "script.py")
    py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "compiled.pyc"))
    program = {
        "file": ["script.py"],
        "link": ["package/link.py"],
        "compiled": [tmp_path / "compiled.pyc"],
        "folder": [tmp_path],
        "archive": ["archive.pyz"],
        "module": ["-m", "script"],
        "package": ["-m", "package"],
    }[door]
    expected = programs.run([sys.executable, *program, "--epochs"], folder=tmp_path)
    left = sorted(tmp_path.rglob("*"))
    done = programs.run([*forked.python(), *RUN, *program, "--epochs"], folder=tmp_path, timeout=90)
    assert (done.returncode, done.stdout) == (1, expected.stdout), done.stderr
    assert done.stdout.count("True True") == 3, done.stdout
    assert sorted(tmp_path.rglob("*")) == left  # no compiled file that Python itself does not leave


@pytest.mark.parametrize("launcher", ["mpirun", "alone"])
def test_an_unmodified_script_in_torchruns_style(tmp_path, launcher):
    script = """
        import os
        import torch.distributed as dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=rank, world_size=size)
        assert dist.is_mpi_available()
        dist.monitored_barrier()
        os.write(1, f"{os.environ.get('LOCAL_RANK', 0)} {type(dist.group.WORLD).__module__} {__name__}\\n".encode())
    """
    lines = run(tmp_path, launcher, script, before=RUN)
    assert lines == [f"{rank} {OURS} __main__" for rank in range(2 if launcher == "mpirun" else 1)]


@pytest.mark.parametrize(("before", "asked"), [(RUN, "gloo"), (RUN, "mpi"), ((), "mpi")])
def test_the_store_of_one_process_without_a_launcher(tmp_path, before, asked):
    script = """
        import sys
        import hpcdist.torch_bridge
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store
        for _ in range(2):
            dist.init_process_group(sys.argv[1])
            store = _get_default_store()
            store.set("key", "value")
            print(store.get("key"), store.add("calls", 1), dist.get_world_size())
            dist.destroy_process_group()
    """
    lines = run(tmp_path, "alone", script, asked, before=before, is_forked=True)
    assert lines == ["b'value' 1 1"] * 2  # the second world has a store of its own


WORLD_OF_ONE = """
    import sys, warnings
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group(sys.argv[1], **eval(sys.argv[2]))
        print(["no launcher started" in str(each.message) for each in caught].count(True))
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(("before", "asked"), [(RUN, "gloo"), ((), "hpcdist")])
def test_a_world_of_one_in_a_job_of_several_tasks_warns_unless_its_size_is_given(tmp_path, monkeypatch, before, asked):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(WORLD_OF_ONE))
    store, url = "store=dist.HashStore()", "init_method='tcp://127.0.0.1:1'"
    given = [f"dict({each}, rank=0, world_size=1)" for each in ([store, url] if before else [store])]
    for arguments, count in [*((each, "0") for each in given), *([("{}", "1")] if before else [])]:
        command = [*forked.python(), *before, path, asked, arguments]
        done = programs.run(command, folder=tmp_path, timeout=90, SLURM_NTASKS="8")
        assert done.stdout.split() == [count], done.stderr


def test_a_world_of_one_over_a_store_of_its_own_is_left_to_torch(tmp_path):
    script = """
        import os
        import torch.distributed as dist
        if os.environ["RANK"] == "0":  # the other rank makes none
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.barrier()
            os.write(1, f"{dist.get_world_size()} {type(dist.group.WORLD).__module__}\\n".encode())
            dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()
        os.write(1, f"{dist.get_world_size()} {type(dist.group.WORLD).__module__}\\n".encode())
    """
    lines = run(tmp_path, "mpirun", script, before=RUN, is_forked=True)
    assert lines == ["1 torch.distributed.distributed_c10d", *[f"2 {OURS}"] * 2]


def test_a_second_world_made_by_hand_is_not_the_default_group(tmp_path):
    """As trainers do that send weights to other processes: a rendezvous and a group without a list of ranks."""
    script = """
        import os, sys
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        def world(backend, name, rank, size):
            store, rank, size = next(c10d.rendezvous(f"file://{sys.argv[1]}/{name}", rank, size))
            store = dist.PrefixStore(name, store)
            arguments = {"group_name": name, "timeout": timedelta(seconds=60)}
            group, _ = c10d._new_process_group_helper(size, rank, [], c10d.Backend(backend), store, **arguments)
            c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
            return group

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        groups = [world("gloo", "both", rank, 2), world("hpcdist", "ours", rank, 2)]
        if rank == 1:
            groups.append(world("gloo", "one", 0, 1))
        for group in groups:
            dist.all_reduce(tensor := torch.ones(1), group=group)
            assert group is not dist.group.WORLD and int(tensor) == dist.get_world_size(group)
            dist.destroy_process_group(group)
        dist.all_reduce(tensor := torch.ones(1))
        os.write(1, f"{int(tensor)} {[type(group).__module__.partition('.')[0] for group in groups]}\\n".encode())
        dist.destroy_process_group()
    """
    lines = run(tmp_path, "mpirun", script, str(tmp_path), before=RUN, is_forked=True)
    assert lines == ["2 ['torch', 'hpcdist', 'torch']", "2 ['torch', 'hpcdist']"]


def test_run_without_a_script(tmp_path):
    done = programs.run([sys.executable, *RUN, "absent.py"], folder=tmp_path)
    assert done.returncode == 2
    assert "no script 'absent.py'" in done.stderr


def test_an_initialised_torch_is_left_alone(tmp_path):
    script = """
        import os
        import torch, torch.distributed as torch_dist, hpcdist as dist
        store = torch_dist.HashStore()
        torch_dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        theirs = torch_dist.group.WORLD
        dist.init_process_group()
        assert dist.get_world_size() == 2 and torch_dist.get_world_size() == 1
        assert torch_dist.group.WORLD is theirs and dist.group.WORLD is not theirs
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        torch_dist.all_reduce(tensor)
        try:
            dist.init_device_mesh("cpu", (2,))
        except RuntimeError as error:
            assert "bridge=True" in str(error)
        dist.destroy_process_group()
        assert torch_dist.is_initialized() and torch_dist.group.WORLD is theirs
        os.write(1, f"{int(tensor)}\\n".encode())
    """
    assert run(tmp_path, "mpirun", script, is_forked=True) == ["2", "2"]


def test_opting_out_by_a_keyword_or_a_variable(tmp_path):
    script = """
        import os
        import torch, torch.distributed as torch_dist, hpcdist as dist
        for variable, keywords in (("", {"bridge": False}), ("0", {})):
            os.environ["HPCDIST_BRIDGE"] = variable
            dist.init_process_group(**keywords)
            assert not torch_dist.is_initialized(), keywords
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=dist.new_group([0, 1]))
            torch_dist.init_process_group("hpcdist")  # and in again: the same world
            assert torch_dist.group.WORLD is dist.group.WORLD
            torch_dist.destroy_process_group()
            assert not dist.is_initialized()
            os.write(1, f"{int(tensor)}\\n".encode())
    """
    assert run(tmp_path, "mpirun", script, is_forked=True) == ["2"] * 4


def test_hundreds_of_worlds_leak_nothing(tmp_path):
    script = """
        import gc, os, threading
        import torch, torch.distributed as torch_dist, hpcdist as dist
        from torch.nn.parallel import DistributedDataParallel
        from hpcdist.core.journal import RING

        def cycle(by_torch):
            torch_dist.init_process_group("hpcdist") if by_torch else dist.init_process_group()
            assert torch_dist.is_initialized() and dist.is_initialized()
            group = dist.new_group([0, 1]) if by_torch else torch_dist.new_group([0, 1])
            tensor = torch.ones(2)
            torch_dist.all_reduce(tensor, group=group, async_op=True).wait()
            mesh = dist.init_device_mesh("cpu", (2, 1))
            DistributedDataParallel(torch.nn.Linear(2, 2))(tensor).sum().backward()
            dist.destroy_process_group() if by_torch else torch_dist.destroy_process_group()
            assert not torch_dist.is_initialized() and not dist.is_initialized()

        def census():
            RING.calls.clear()  # the recorder keeps the last calls, however many worlds ago
            gc.collect()
            status = open("/proc/self/status").read()
            resident = int(status.split("VmRSS:")[1].split()[0])
            return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd")), resident

        import sys
        hook = sys.excepthook
        for turn in range(200):
            if turn == 60:
                before = census()
            cycle(turn % 2)
            sys.excepthook = hook  # torch's init wraps the hook again each time
        after = census()
        grown = [b - a for a, b in zip(before, after)]
        assert grown[0] < 1400 and grown[1] < 9 and grown[2] < 9 and grown[3] < 20_000, (before, after)
        os.write(1, b"none\\n")
    """
    assert run(tmp_path, "mpirun", script, is_forked=True) == ["none", "none"]


def test_a_world_that_torch_aborts_is_forgotten(tmp_path):
    script = """
        import torch, torch.distributed as torch_dist, hpcdist as dist
        from torch.distributed.distributed_c10d import _abort_process_group

        for _ in range(2):
            torch_dist.init_process_group("hpcdist", store=torch_dist.HashStore(), rank=0, world_size=1)
            group = torch_dist.new_group([0])
            _abort_process_group(group)
            assert torch_dist.is_initialized() and dist.is_initialized()
            _abort_process_group()
            assert not torch_dist.is_initialized() and not dist.is_initialized()
            try:
                dist.get_rank()
            except ValueError as error:
                print(str(error)[:45])
    """
    assert run(tmp_path, "alone", script, is_forked=True) == ["Default process group has not been initialize"] * 2


@pytest.mark.parametrize(
    "first", ["import hpcdist", "import hpcdist_stores", "import hpcdist.torch_bridge", "import torch"]
)
def test_the_installation_and_an_import(tmp_path, installed, first):
    assert run(tmp_path, "alone", f"{first}\n{textwrap.dedent(TRAIN)}", "mpi", before=RUN, **installed)
    script = f"""
        {first}
        import torch.distributed
        print(torch.distributed.Backend("HPCDIST"), torch.distributed.is_backend_available("hpcdist"))
    """
    assert run(tmp_path, "alone", script, **installed) == ["hpcdist True"]


def test_a_program_that_never_heard_of_hpcdist(tmp_path, installed):
    script = """
        import os, sys
        import torch.distributed as dist
        assert "hpcdist" not in sys.modules and "HPCDIST" in vars(dist.Backend)
        for _ in range(2):
            try:
                dist.init_process_group("gloo")
            except ValueError as error:
                os.write(1, f"{error}\\n".encode())
        assert not dist.is_initialized() and "mpi4py.MPI" not in sys.modules
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "WORLD_SIZE": "2"}
        launched = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")]
        os.environ["RANK"] = next(filter(None, launched))
        dist.init_process_group("gloo")
        os.write(1, f"{dist.get_backend()} {'mpi4py.MPI' in sys.modules}\\n".encode())
    """
    lines = run(tmp_path, "mpirun", script, str(free_port()), **installed)
    missing = (
        "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"
    )
    assert lines == [missing] * 4 + ["gloo False"] * 2


def test_switched_off(tmp_path, installed):
    script = "import torch.distributed as dist; print('HPCDIST' in vars(dist.Backend))"
    assert run(tmp_path, "alone", script, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **installed) == ["False"]
