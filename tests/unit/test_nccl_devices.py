"""Which GPU a rank takes, and that a GPU taken twice is noticed."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcdist.backends.nccl.bootstrap import check_shared, roots_of
from hpcdist.backends.nccl.streams import Batch, Held, PendingCall, Streams, StreamWork
from hpcdist.core.errors import DistBackendError
from hpcdist.launch import devices

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


def placed(views: list[tuple[str, ...]], shares: bool = False) -> list[int]:
    return [devices.place(views, rank, shares) for rank in range(len(views))]


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([(A, B, C, D)] * 4, [0, 1, 2, 3]),  # who sees all GPUs takes one by its rank on the node
        ([(A, B, C, D)] * 3, [0, 1, 2]),
        ([(A,), (B,), (C,)], [0, 0, 0]),  # bound by the launcher: the first of their own
        ([(A, B), (C, D)], [0, 0]),  # --gpus-per-task=2
        ([(A, B), (A, B), (C, D), (C, D)], [0, 1, 0, 1]),  # --gpu-bind by socket
    ],
)
def test_the_gpu_that_a_rank_takes(views: list[tuple[str, ...]], expected: list[int]) -> None:
    assert placed(views) == expected


def test_more_ranks_than_gpus_is_an_error_and_not_a_remainder() -> None:
    with pytest.raises(DistBackendError, match="4 ranks of this node see the same 2 GPUs"):
        devices.place([(A, B)] * 4, 3)
    assert placed([(A, B)] * 4, shares=True) == [0, 0, 1, 1]
    with pytest.raises(DistBackendError, match="no GPU"):
        devices.place([()], 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "2"}, 0),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1),
    ],
)
def test_without_mpi_the_launcher_says_it(monkeypatch, environ: dict[str, str], expected: int) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: (A, B, C, D))
    assert devices.place(*devices.views_by_launcher(environ)) == expected


def test_without_mpi_and_without_a_launcher_a_choice_of_gpus_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: (A, B))
    with pytest.raises(DistBackendError, match="device_id="):
        devices.views_by_launcher({})
    monkeypatch.setattr(devices, "visible_gpus", lambda: ("the only one",))
    assert devices.views_by_launcher({}) == ([("the only one",)], 0)


def test_two_ranks_on_one_gpu_is_an_error_on_every_rank_unless_asked_for() -> None:
    used = [("n1", A, "cuda:0"), ("n1", B, "cuda:1"), ("n1", A, "cuda:0"), ("n2", A, "cuda:0")]
    with pytest.raises(DistBackendError, match=r"ranks \[0, 2\] of the group use one GPU: cuda:0 \(GPU-a\) on n1"):
        check_shared(used, (2, 30, 7), {})
    check_shared(used, (2, 30, 7), {devices.SHARE: "1"})
    check_shared(used[:2], (2, 30, 7), {})
    with pytest.raises(DistBackendError):
        check_shared(used, (2, 30, 7), {devices.SHARE: "0"})


@pytest.mark.parametrize(("version", "advice"), [((2, 30, 7), "set {}=1"), ((2, 28, 9), "2.30 or later and set {}=1")])
def test_the_way_to_share_a_gpu_is_that_of_the_release(version: tuple[int, ...], advice: str) -> None:
    with pytest.raises(DistBackendError, match=f"to share GPUs on purpose .*{advice.format(devices.SHARE)}"):
        check_shared([("n1", A, "cuda:0")] * 2, version, {})


def test_above_128_ranks_several_make_an_id_where_the_release_can() -> None:
    assert roots_of(1) == roots_of(128) == [0]
    assert roots_of(129) == [0, 65]
    roots = roots_of(1000)
    assert len(roots) == 8
    assert roots == [rank * 125 for rank in range(8)]
    for size in range(1, 1500, 37):  # parts differ by one at most, longer ones first: how NCCL deals ranks to ids
        starts = [*roots_of(size), size]
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= 128


class Recorder:
    """A stream or an event, whose methods do nothing."""

    def __init__(self, *_: Any) -> None:
        self.stream_id = 0

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


def test_streams_need_of_torch_xpu_what_it_has_had_since_2_8() -> None:
    """No handle as CUDA's streams have, and no captures."""
    xpu: Any = SimpleNamespace(Stream=Recorder, Event=Recorder, current_stream=Recorder, current_device=lambda: 0)
    xpu.device = xpu.stream = lambda _: nullcontext()
    streams, ran = Streams(torch.device("xpu", 0), lambda reason: True, xpu), []
    batch = Batch(lambda _, calls, is_group: [each.queue(0) for each in calls] and None)
    work = StreamWork(PendingCall(streams, streams.current(), (), 0, call=(None,)), [])
    batch.begin(Held("all_reduce", ran.append, lambda: ran.append(1), work)).wait()
    streams.settle("destroy_process_group")
    assert ran == [0, 1]
