"""One default group for all tests in this folder: cpu:mpi,cuda:nccl, at as many ranks as mpirun started.

mpirun -n 1 python -m pytest --with-mpi tests/gpu
NCCL_MULTI_RANK_GPU_ENABLE=1 mpirun -n 4 python -m pytest --with-mpi tests/gpu     # several ranks on one GPU
make test-gpu                                                                      # on emulated GPUs
"""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec

import pytest
import torch

import hpcdist as dist


def missing() -> str | None:
    """Return what these tests lack here, or None."""
    if find_spec("nccl") is None:
        return "nccl4py is not installed (pip install 'hpcdist[nccl-cu12]')"
    if not torch.cuda.is_available():
        return f"no NVIDIA GPU that torch {torch.__version__} can use"
    return None


def pytest_collection_modifyitems(items):
    reason = missing()
    for item in items:
        if "tests/gpu" not in str(item.path):
            continue
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def world():
    if missing() is not None:
        yield None
        return
    dist.init_process_group("cpu:mpi,cuda:nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))  # connects, which a capture cannot, and waits for the device
    torch.cuda.synchronize()
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu:mpi,cuda:nccl", "cpu:mpi,cuda:torch", "mpi"])
def group(world, request):
    """A group of all ranks whose CUDA tensors NCCL carries, torch's own library, or MPI through host memory."""
    made = dist.new_group(backend=request.param)
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def device(world):
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def connect(device):
    """Makes groups of all ranks that have done one all_reduce, and destroys them after the test."""
    groups = []

    def make(**given):
        groups.append(dist.new_group(**given))
        dist.all_reduce(torch.ones(1, device=device), group=groups[-1])
        torch.cuda.synchronize()
        dist.barrier()
        return groups[-1]

    yield make
    for each in groups:
        dist.destroy_process_group(each)


class Gate:
    """A place on a stream that the device does not pass until it is opened, however long the host takes.

    Whatever makes CUDA wait for the device must have happened before: the first use of a kernel or a communicator.
    """

    def __init__(self):
        self._driver, self._libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)
        self._libc.sem_init(self._semaphore, 0, 0)
        self._closed = 0

    def close(self):
        """Hold up what is queued on the current stream from now on."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert self._driver.cuLaunchHostFunc(stream, self._libc.sem_wait, self._semaphore) == 0
        self._closed += 1

    def open(self):
        """Let it go on."""
        while self._closed:
            self._closed -= 1
            self._libc.sem_post(self._semaphore)


@pytest.fixture
def gate(device):
    made = Gate()
    yield made
    made.open()
    torch.cuda.synchronize()


@pytest.fixture
def alone(world, device):
    """A communicator of this rank only, which ``adopt`` takes as that of a pair."""
    from hpcdist.backends.nccl.library import load

    core = load().core
    return core.Communicator.init(1, 0, core.get_unique_id())


@pytest.fixture
def emulation(world):
    """The emulated GPUs, for what only they can show."""
    loaded = sys.modules.get("tests.emulated_gpu.load")
    if loaded is None:
        pytest.skip("needs the emulated GPUs (make test-gpu)")
    return loaded.EMULATION
