"""Backend names and backend strings mean what they mean in c10d."""

import pytest
import torch

import hpcdist as dist
from hpcdist.c10d import lifecycle
from hpcdist.core import registry


def test_a_name_is_a_lower_case_string():
    assert dist.Backend("MPI") == dist.Backend.MPI == "mpi"
    assert type(dist.Backend("mpi")) is str
    assert dist.Backend("whatever") == "whatever"
    with pytest.raises(ValueError, match="string"):
        dist.Backend(5)


def test_config():
    assert dist.BackendConfig("cpu:mpi,cuda:nccl").get_device_backend_map() == {"cpu": "mpi", "cuda": "nccl"}
    assert repr(dist.BackendConfig("CPU:MPI,cuda:nccl")) == "cpu:mpi,cuda:nccl"
    assert dist.BackendConfig("mpi").get_device_backend_map() == {"cpu": "mpi", "cuda": "mpi"}
    assert dist.BackendConfig("gloo").get_device_backend_map() == {"cpu": "gloo"}
    for bad in ("cpu:", "cpu:mpi,cpu:gloo", ":mpi", "cpu:mpi:x"):
        with pytest.raises(ValueError, match=r"Invalid|Duplicate"):
            dist.BackendConfig(bad)
    with pytest.warns(UserWarning, match="capability"):
        assert dist.BackendConfig("smoke").get_device_backend_map()["cpu"] == "smoke"


def test_availability():
    assert dist.is_available()
    assert dist.is_mpi_available()
    assert dist.is_nccl_available() == (dist.is_nccl_available() and torch.cuda.is_available())
    assert not dist.is_ucc_available()
    assert not dist.is_xccl_available()
    assert dist.is_backend_available("MPI")
    assert dist.is_backend_available("cpu:mpi,cuda:mpi")
    assert not dist.is_backend_available("cpu:mpi,cuda:ucc")
    assert not dist.is_backend_available("smoke")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "mpi"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "gloo"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi"),
    ],
)
def test_default_backend_for_device(variables, expected, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dist.get_default_backend_for_device("cpu") == expected
    assert dist.get_default_backend_for_device(torch.device("cuda")) == "nccl"
    with pytest.raises(ValueError, match="not registered"):
        dist.get_default_backend_for_device("meta")


def test_a_registered_backend_carries_a_group(monkeypatch):
    for table in (dist.Backend.backend_list, dist.Backend.backend_capability, dist.Backend.backend_type_map):
        monkeypatch.setattr(dist.Backend, next(n for n, t in vars(dist.Backend).items() if t is table), table.copy())
    monkeypatch.setattr(registry, "PLUGINS", {})
    made = []

    def creator(store, rank, size, timeout):
        made.append((rank, size, timeout))
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("Own", creator, devices=["cpu"])
    assert dist.Backend.OWN == "own"
    assert dist.is_backend_available("own")
    dist.init_process_group("own", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert made[0][:2] == (0, 1)
        assert dist.get_backend() == "own"
        tensor = torch.ones(2)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [1, 1]
        group = dist.new_group([0])
        dist.all_reduce(tensor, group=group)
        assert len(made) == 2
    finally:
        dist.destroy_process_group()
        del dist.Backend.OWN


def test_ops_on_complex_numbers():
    for name in ("SUM", "AVG"):
        assert dist.supports_complex(getattr(dist.ReduceOp, name))
    for name in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert not dist.supports_complex(getattr(dist.ReduceOp, name))
    with pytest.warns(FutureWarning):
        assert dist.reduce_op.SUM == dist.ReduceOp.SUM


def test_the_world_s_store_waits_as_long_as_torchs():
    from hpcdist.torch_bridge.mirror import fresh_store

    assert fresh_store().timeout == torch.distributed.default_pg_timeout


@pytest.mark.parametrize("is_built", [True, False])
def test_hpcdist_is_registered_for_the_devices_that_this_torch_has(is_built, monkeypatch):
    from torch.distributed import distributed_c10d

    from hpcdist import autoload

    registered = {}
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.delattr(torch.distributed.Backend, "HPCDIST")
    monkeypatch.setattr(torch.distributed.Backend, "register_backend", lambda *_, **given: registered.update(given))
    monkeypatch.setattr(autoload, "STOCK", [])
    for name in ("rendezvous", "_new_process_group_helper", "is_mpi_available"):  # put back after the test
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setattr(torch.distributed, "is_mpi_available", torch.distributed.is_mpi_available)
    autoload.autoload()
    assert registered["devices"] == (["cpu", "cuda"] if is_built else ["cpu"])


@pytest.mark.parametrize("given", [1, torch.device("xpu", 1)])
def test_a_device_of_a_torch_for_xpu(given, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert lifecycle.check_device(given) == torch.device("xpu", 1)
    with pytest.raises(ValueError, match="xpu:2 is out of range: there are 2 devices"):
        lifecycle.check_device(torch.device("xpu", 2))


def test_a_device_by_name_is_refused():
    with pytest.raises(TypeError, match="device_id is 'cuda:0' of type str"):
        lifecycle.check_device("cuda:0")
