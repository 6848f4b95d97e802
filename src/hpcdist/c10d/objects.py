"""Object collectives and messages.

Every rank of the group calls the collective ones. Objects are pickled, and unpickling runs code: receive them
only from ranks that you trust, such as those of your own job. Over MPI they are sent by pickle protocol 5 with
out-of-band buffers: arrays inside are not copied into the pickle, and may be larger than 2 GiB.

With ``weights_only=True`` (c10d's since torch 2.14) a rank writes its objects by ``torch.save`` and reads received ones
by ``torch.load(weights_only=True)``, which runs no code of the sender's: tensors, numbers, texts, containers of these,
and classes given to ``torch.serialization.add_safe_globals``. It refuses everything else, including ordinary pickles.
Give it on all ranks. If ranks differ, each rank's own value decides how it reads; with False it reads both forms.
"""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.c10d.collectives import check_root, resolve_root
from hpcdist.c10d.point_to_point import self_message_error
from hpcdist.core import world
from hpcdist.core.group import Group


def check_list(value: Any, name: str, length: int, what: str, is_read: bool = False) -> None:
    """Raise if an argument is not a list, or is too short; an input may be a tuple, as in c10d."""
    if not isinstance(value, list) and not (is_read and isinstance(value, tuple)):
        raise TypeError(f"`{name}` is of type {type(value).__name__}; expected a list{' or a tuple' * is_read}")
    if len(value) < length:
        raise ValueError(f"`{name}` has {len(value)} entries; expected {length}, {what}")


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """Gather every rank's object into ``object_list`` on all ranks.

    Args:
        object_list: the output, one entry for each rank, written in place.
        obj: this rank's picklable object.
        group: the group; None for the default one.
        weights_only: read only tensors, plain values and registered classes (see this module).

    Raises:
        TypeError: not a list, or an object that cannot be pickled.
        ValueError: a list shorter than the group.
        UnpicklingError: with ``weights_only``, an object that could run code.
    """
    if (pg := world.member_group(group, "all_gather_object")) is None:
        return
    size = len(pg.ranks)
    check_list(object_list, "object_list", size, "one a rank of the group")
    with pg.during("all_gather_object"):
        object_list[:size] = pg.any_backend().objects.all_gather(obj, weights_only)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gather every rank's object into a list on one rank.

    Args:
        obj: this rank's picklable object.
        object_gather_list: on the destination the output, one entry for each rank; None elsewhere.
        dst, group_dst: the destination as a global rank or as a rank of the group; rank 0 if neither is given.
        group, weights_only: as for ``all_gather_object``, UnpicklingError too.

    Raises:
        ValueError: a list on another rank than the destination, none there, or one too short.
    """
    if (target := resolve_root(group, "gather_object", dst, group_dst)) is None:
        return
    pg, root = target
    if check_root(object_gather_list, "object_gather_list", "destination", pg, root):
        check_list(object_gather_list, "object_gather_list", len(pg.ranks), "one a rank of the group")
    with pg.during("gather_object", root):
        gathered = pg.any_backend().objects.gather(obj, root, weights_only)
    if gathered is not None and object_gather_list is not None:
        object_gather_list[: len(pg.ranks)] = gathered


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Write one rank's list of objects to ``object_list`` on all ranks.

    Args:
        object_list: picklable objects on the source; elsewhere the output, a list of the same length.
        src, group_src: the source as a global rank or as a rank of the group; rank 0 if neither is given.
        device: accepted as in c10d; the group's backend decides which device sends the bytes.
        group, weights_only: as for ``all_gather_object``, UnpicklingError too.

    Raises:
        TypeError: not a list, or an object that cannot be pickled.
        RuntimeError: lists of different lengths.
    """
    if (target := resolve_root(group, "broadcast_object_list", src, group_src)) is None:
        return
    pg, root = target
    check_list(object_list, "object_list", 0, "any number", is_read=pg.rank() == root)
    with pg.during("broadcast_object_list", root):
        objects = pg.any_backend().objects.broadcast(object_list, root, weights_only)
    if len(objects) != len(object_list):
        raise RuntimeError(
            f"broadcast_object_list: the source's list has {len(objects)} entries, `object_list` on rank "
            f"{pg.rank()} of the group has {len(object_list)}"
        )
    if pg.rank() != root:
        object_list[:] = objects


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Send each rank its object of one rank's list; it becomes entry 0 of the output list.

    Args:
        scatter_object_output_list: the output, of at least one entry; the first is written.
        scatter_object_input_list: on the source one picklable object for each rank; not used elsewhere.
        src, group_src: the source as a global rank or as a rank of the group; rank 0 if neither is given.
        group, weights_only: as for ``all_gather_object``, UnpicklingError too.

    Raises:
        ValueError: an empty output list, or an input list of the wrong length.
    """
    if (target := resolve_root(group, "scatter_object_list", src, group_src)) is None:
        return
    pg, root = target
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    given = scatter_object_input_list
    if pg.rank() == root and (not isinstance(given, (list, tuple)) or len(given) != len(pg.ranks)):
        raise ValueError(
            f"Argument ``scatter_object_input_list`` must be a list of {len(pg.ranks)} objects, one a rank, on source "
            f"rank {root}; got {given!r:.80}"
        )
    with pg.during("scatter_object_list", root):
        scatter_object_output_list[0] = pg.any_backend().objects.scatter(scatter_object_input_list, root, weights_only)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send a list of picklable objects to one rank.

    Args:
        object_list: the objects.
        dst, group_dst: the receiver as a global rank or as a rank of the group, one of them.
        device, use_batch: accepted as in c10d; no effect here.
        group, weights_only: as for ``all_gather_object``, UnpicklingError too.

    Raises:
        ValueError: no receiver, two, one outside the group, or this rank itself.
    """
    if (target := world.route(group, "send_object_list", dst, group_dst)) is None:
        return
    pg, peer = target
    if peer == pg.rank():
        raise self_message_error(pg, "destination")
    check_list(object_list, "object_list", 0, "any number", is_read=True)
    with pg.during("send_object_list", peer):
        pg.any_backend().objects.send(object_list, peer, weights_only)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receive a list of objects into ``object_list`` and return the sender.

    Args:
        object_list: the output, of the length of the list that was sent.
        src, group_src: the sender as a global rank or as a rank of the group; anyone if neither is given.
        device, use_batch: accepted as in c10d; no effect here.
        group, weights_only: as for ``all_gather_object``, UnpicklingError too.

    Returns:
        The sender's global rank; -1 on ranks outside the group.

    Raises:
        ValueError: two senders, one outside the group, or this rank itself.
        RuntimeError: lists of different lengths.
    """
    if (target := world.origin(group, "recv_object_list", src, group_src)) is None:
        return -1
    pg, source = target
    if source == pg.rank():
        raise self_message_error(pg, "source")
    check_list(object_list, "object_list", 0, "any number")
    with pg.during("recv_object_list", source):
        objects, sender = pg.any_backend().objects.recv(source, weights_only)
    if len(objects) != len(object_list):
        raise RuntimeError(
            f"recv_object_list: the list sent has {len(objects)} entries, `object_list` {len(object_list)}"
        )
    object_list[:] = objects
    return pg.ranks[sender]
