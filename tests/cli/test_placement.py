"""The doctor's advice on the topologies of known machines, and the warning of ``init_process_group``."""

import functools
import json
import os
import sys
import warnings

import pytest

import hpcdist as dist
from hpcdist.cli.doctor import placement
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK
from hpcdist.launch import topology
from tests import programs
from tests.cli import topologies

OPEN_MPI, HYDRA = "mpirun (Open MPI)", "mpiexec (hydra: MPICH, Intel MPI)"
SRUN_7 = "srun --cpus-per-task=7 --cpu-bind=cores --distribution=block:cyclic …"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function from a machine's name to the machine; its folder is made once, and not changed."""
    return functools.cache(lambda name: topologies.make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=["xeon", "epyc", "grace", "frontier", "lumi"])
def machine(request, make):
    return make(request.param)


def only(ranks, *levels):
    """Return the findings on a node."""
    found = placement.judge_node("n0", dict(enumerate(ranks)))
    return [each for each in found if each.level in levels]


def advice(ranks):
    return {each.text: each.remedy for each in only(ranks, ADVICE)}


def everything(machine):
    return ",".join(map(str, machine.node.usable))


def test_what_is_read(machine):
    node = machine.node
    cores, domains, sockets, gpus = {
        "xeon": (80, 2, 2, [0, 0, 1, 1]),
        "epyc": (48, 8, 2, [3, 1, 7, 5]),
        "grace": (72, 1, 1, [0]),
        "frontier": (56, 4, 1, [3, 3, 1, 1, 0, 0, 2, 2]),
        "lumi": (56, 4, 1, [3, 3, 1, 1, 0, 0, 2, 2]),
    }[machine.name]
    assert node.room()[1:] == (cores, domains, sockets)
    assert machine.gpus == gpus
    assert set(node.cards.values()) == set(gpus)
    assert node.domains(node.cpus[0]) == [0]
    assert node.distance([0], 0) == 10
    assert 0 not in node.usable or machine.name in ("xeon", "epyc", "grace")  # reserved where there is low-noise mode


def test_a_gpu_whose_domain_is_its_memory_is_near_to_the_cpus_beside_it(tmp_path):
    grace = topologies.make("grace", tmp_path)
    topologies.write(tmp_path, "bus/pci/devices/0009:01:00.0/numa_node", "1")
    assert topology.gpu_domain("0009:01:00.0", grace.node, tmp_path) == 0
    assert topology.gpu_domain("0000:00:00.0", grace.node, tmp_path) is None  # no such device


def test_a_machine_without_numa_has_no_domains(tmp_path):
    node = topology.read(tmp_path, "")
    assert node.room() == (0, 0, 0, 0)
    assert placement.in_domains(node, [0, 1], [None], None)["cards"] == {}


def test_what_no_domain_has_is_left_out_and_what_is_not_told_is_guessed(tmp_path):
    topologies.make("xeon", tmp_path)
    topologies.write(tmp_path, "fs/cgroup/job/cpuset.cpus.effective", "0-499")
    topologies.write(tmp_path, "class/infiniband/mlx5_9/device/numa_node", "-1")
    topologies.write(tmp_path, "devices/system/cpu/cpu3/topology/thread_siblings_list", "")
    node = topology.read(tmp_path, topologies.GROUP)
    assert (node.usable, node.cores) == (set().union(*node.cpus.values()), 80)
    assert sorted(node.cards) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


L3 = [f"{8 * region + 1}-{8 * region + 7}" for region in range(8)]  # without the reserved cores
NEAR_L3 = [L3[region] for region in (6, 7, 2, 3, 0, 1, 4, 5)]
NEAR = ["18-23", "6-11", "42-47", "30-35"]  # to epyc's GPUs, and each to its card
BLOCKS = [f"{12 * rank}-{12 * rank + 11}" for rank in range(4)]
SOCKETS = ["0-19,40-59", "20-39,60-79"]
PACKED = ["0", "1", "2", "3"]
BY_NUMA = "mpirun --map-by ppr:2:numa:PE=20 --bind-to core …"
FAR = "the GPU is in another NUMA domain"
BY_DOMAIN = "srun --cpu-bind=map_ldom:3,3,1,1,0,0,2,2 …   # or: --gpus-per-task=1 --gpu-bind=closest"
IDLE = "all 4 ranks on n0 run in NUMA domain 0; the job may use domain 1 too"
SAME_CORES = "ranks on n0 run on hardware threads of the same cores"
WIDE = "threads of ranks 0, 1 on n0 run in several sockets"
UNSET = "unset {0}   # the nearest is chosen by itself; for rank {1} it is mlx5_{1}"
SHARED = "ranks 0, 1 on n0 are bound to the same 1 core"


def kept(variable, value, ranks):
    return f"{variable}={value} keeps {placement.format_ranks(ranks)} on n0 from nearer cards"


# the machine, the CPUs of each rank or how many ranks may use all, the launcher, and what else is so;
# then what the whole advice says, and how each remedy begins
ADVISED = [
    ("xeon", 4, "srun", {}, [("of 2 NUMA", "srun --cpus-per-task=20 --cpu-bind=cores --distribution=block:cyclic …")]),
    ("xeon", 4, OPEN_MPI, {}, [("of 2 NUMA domains", BY_NUMA)]),
    ("xeon", 3, OPEN_MPI, {}, [("of 2 NUMA domains", BY_NUMA)]),  # 40 cores a domain
    ("xeon", 4, HYDRA, {}, [("of 2 NUMA domains", "mpirun -bind-to core:20 -map-by numa …")]),
    ("epyc", 8, OPEN_MPI, {}, [("of 8 NUMA domains", "mpirun --map-by ppr:1:numa:PE=6 --bind-to core …")]),
    ("epyc", 4, OPEN_MPI, {}, [("of 8 NUMA domains", "mpirun --map-by ppr:2:package:PE=12 --bind-to core …")]),
    ("epyc", 4, HYDRA, {}, [("of 8 NUMA domains", "mpirun -bind-to core:12 -map-by socket …")]),
    ("frontier", 8, "srun", {}, [("of 4 NUMA domains", SRUN_7)]),
    ("frontier", 8, OPEN_MPI, {}, [("of 4 NUMA domains", "mpirun --map-by ppr:2:numa:PE=7 --bind-to core …")]),
    ("lumi", 8, "mpiexec (PALS)", {}, [("of 4 NUMA domains", "mpiexec --depth=14 --cpu-bind=depth …")]),
    ("xeon", PACKED, OPEN_MPI, {"gpus": False}, [(IDLE, BY_NUMA)]),
    ("xeon", ["0", "1", "40", "41"], "srun", {"gpus": False}, []),
    ("xeon", SOCKETS, "srun", {"gpus": False, "threads": 8}, [(WIDE, "srun ")]),
    ("xeon", SOCKETS, "srun", {"gpus": False, "threads": 1}, []),
    ("xeon", ["0-79"], "srun", {"gpus": False, "threads": 80}, []),  # the node's only rank
    ("xeon", ["0", "0", "40-44", "45-49"], "srun", {"gpus": False}, [(SHARED, "srun ")]),
    ("epyc", ["0", "48"], "srun", {"gpus": False}, [
        (SAME_CORES, "srun --threads-per-core=1 --cpus-per-task=48 "),
        ("all 2 ranks on n0 run in NUMA domain 0; the job may use domains 1, 2, 3, 4, 5, 6, 7 too", "srun "),
    ]),
    ("frontier", L3, OPEN_MPI, {"visible": "ROCR"}, [(FAR, "export ROCR=4,5,2,3,6,7,0,1")]),
    ("lumi", L3, OPEN_MPI, {"visible": "ROCR"}, [(FAR, "export ROCR=4,5,2,3,6,7,0,1")]),
    ("lumi", L3, "srun", {}, [(FAR, BY_DOMAIN)]),
    ("lumi", NEAR_L3, "srun", {}, []),
    ("epyc", BLOCKS, HYDRA, {}, [(FAR, "export CUDA_VISIBLE_DEVICES=1,0,3,2")]),
    ("epyc", NEAR, HYDRA, {}, []),
    ("xeon", PACKED, OPEN_MPI, {}, [(IDLE, BY_NUMA), (FAR, f"{BY_NUMA}   # then look again")]),
] + [
    ("epyc", NEAR, "srun", {"chosen": {variable: value}},
     [(kept(variable, value, far), UNSET.format(variable, far[0]))] if far else [])
    for variable, value, far in (
        ("UCX_NET_DEVICES", "mlx5_0:1", [1, 2, 3]),
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_2:1", [1, 3]),
        ("NCCL_IB_HCA", "mlx5", []),
        ("NCCL_IB_HCA", "=mlx5_3", [0, 1, 2]),
        ("NCCL_IB_HCA", "^mlx5_1", [1]),
        ("UCX_NET_DEVICES", "eth0", []),
    )
]  # fmt: skip


@pytest.mark.parametrize(("name", "bound", "launcher", "same", "expected"), ADVISED)
def test_advice(name, bound, launcher, same, expected, make):
    machine = make(name)
    cpus = [everything(machine)] * bound if isinstance(bound, int) else bound
    found = advice(topologies.ranks(machine, cpus, launcher, **same))
    assert len(found) == len(expected), found
    for (text, remedy), (words, command) in zip(found.items(), expected, strict=True):
        assert (words in text, remedy.startswith(command)) == (True, True), (text, remedy)


@pytest.mark.parametrize(
    ("name", "bound", "same", "level", "words"),
    [
        ("grace", ["0-71"] * 2, {}, NOTE, "ranks on n0 are not bound: each may use all 72 cores"),
        ("lumi", ["1-7", "9-18", "33-39", "49-55"], {"gpus": False}, NOTE, "rank 1 may move between NUMA domains"),
        ("epyc", BLOCKS, {"gpus": False}, NOTE, None),  # two domains are the share of each
        ("lumi", NEAR_L3, {}, NOTE, "export MPICH_OFI_NIC_POLICY=GPU"),
        ("lumi", NEAR_L3, {"chosen": {"MPICH_OFI_NIC_POLICY": "NUMA"}}, NOTE, None),
        ("xeon", ["0-39", "0-39", "40-79", "40-79"], {"threads": 8}, OK, "have one for each of their threads"),
    ],
)
def test_remarks(name, bound, same, level, words, make):
    ranks = topologies.ranks(make(name), bound, **same)
    found = [f"{each.text}: {each.remedy}" for each in only(ranks, level)]
    assert words in found[0] if words else not found
    assert not advice(ranks)


def test_a_rank_is_given_one_core_at_the_least(make):
    room = make("xeon").node.room()
    assert topology.bind(OPEN_MPI, 100, room) == "mpirun --map-by ppr:50:numa:PE=1 --bind-to core …"
    assert topology.bind("srun", 100, room).startswith("srun --cpus-per-task=1 ")


def test_ranks_on_one_core_of_many(machine):
    found = advice(topologies.ranks(machine, ["1"] * 4, gpus=False))
    text = f"4 ranks share 1 cores on n0, and the job may use {machine.node.room().cpus}: results are right, but slow"
    assert found[text].startswith("srun --cpus-per-task=")


def test_idle_domains_that_another_job_has_are_not_named(tmp_path):
    (tmp_path / "sys").mkdir()
    topologies.make("xeon", tmp_path / "sys")
    topologies.write(tmp_path / "sys", "fs/cgroup/job/cpuset.cpus.effective", "0-9")
    node = topology.read(tmp_path / "sys", topologies.GROUP)
    part = topologies.Machine("xeon", tmp_path / "sys", node, [])
    assert not advice(topologies.ranks(part, ["0", "1", "2", "3"]))


def test_openmp_binds_main_threads_to_one_core():
    """As libgomp does on import of torch, in every rank that the launcher did not bind."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    code = "from hpcdist.cli.doctor import placement; import json; print(json.dumps(placement.look()))"
    done = programs.run([sys.executable, "-c", code], OMP_PROC_BIND="true", OMP_NUM_THREADS="2")
    facts = json.loads(done.stdout)
    facts["room"] = topology.Room(*facts["room"])
    assert len(facts["main"]) == 1 < len(facts["cores"])
    found = advice([{**facts, "threads": 1}] * 2)
    text = f"OMP_PROC_BIND=true binds the main threads of all ranks on n0 to core {facts['main'][0]}"
    assert found[text].startswith("unset OMP_PROC_BIND   # or bind the ranks first: srun --cpus-per-task=")


# -- the warning at the start ----------------------------------------------------------------------------------


def warned(root, monkeypatch, cpus, **environ):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: topology.cpus(cpus))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        topology.warn_if_spread(root, environ)
    return [str(each.message) for each in seen]


def test_the_warning_names_the_launchers_option(make, monkeypatch):
    xeon = make("xeon").root
    ompi = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}
    (text,) = warned(xeon, monkeypatch, "0-79", **ompi)
    assert "rank 0 may run in 2 NUMA domains, and its node has 4 ranks" in text
    assert "mpirun --map-by ppr:2:numa:PE=20 --bind-to core …" in text
    step = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "7"}
    (text,) = warned(xeon, monkeypatch, "0-79", SLURM_STEP_ID="0", **step)
    assert "its node has 2 ranks" in text
    assert "srun --cpus-per-task=40" in text


@pytest.mark.parametrize(("cpus", "size"), [("0-39", "4"), ("0-79", "1"), ("0-79", "")])
def test_no_warning_for_bound_ranks_nor_for_one_a_node(cpus, size, make, monkeypatch):
    assert warned(make("xeon").root, monkeypatch, cpus, LOCAL_WORLD_SIZE=size) == []


def test_no_warning_on_a_machine_of_one_domain(make, monkeypatch, tmp_path):
    for root in (make("grace").root, tmp_path):
        assert warned(root, monkeypatch, "0-71", LOCAL_WORLD_SIZE="4") == []


def test_init_process_group_warns(make, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(topology.warn_if_spread, "__defaults__", (make("xeon").root, os.environ))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(80)))
    with pytest.warns(UserWarning, match="rank 0 may run in 2 NUMA domains"):
        dist.init_process_group("loopback")
    dist.destroy_process_group()
