"""Repeated calls: MPI's function on memory that is described once, between the two steps of the call check.

Loops use the same memory again, or some in turn. To describe a tensor to mpi4py and the call board takes 0.4 µs, to
find it among the last ones 0.1. All of it is one function, because each further call would cost as much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.call_check import CallCheck
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.call_board import LAST
from hpcdist.core.buffers import LOWEST_PLACE, PLACES_KEPT, TensorList, check_memory
from hpcdist.core.call import Call, Run
from hpcdist.core.call_cache import tensors_of
from hpcdist.core.call_log import BLOCK
from hpcdist.core.call_words import COUNTED, NUMBER, SIZES, counts_of, size_of, with_root, with_size
from hpcdist.core.table import EXCHANGES

data_ptr = torch.Tensor.data_ptr
LISTS_KEPT = 16  # calls with lists whose descriptions are kept: up to 100 bytes for each tensor, 2 to 4 µs to make


class Prepared(NamedTuple):
    """The function that carries a call out, and how to make its arguments."""

    function: Callable[..., Any]  # a method of mpi4py, or a function of ours
    # makes its arguments from the addresses of the call's tensors (``addresses_of``), with the elements of a rank's
    # share; returns None if these need the general way, such as tensors that share memory. None for a barrier
    describe: Callable[[Any], tuple[tuple[Any, ...] | None, int]] | None = None
    follow: Callable[..., Any] | None = None  # a step on the output after the call
    # whether the function works on kept copies. ``describe`` then gets the shape of the input in place of the elements.
    # It returns the input's copy; how NumPy fills it (all its bits, the part that is written, the values), or None if
    # torch does; the output's copy; and MPI's arguments. ``follow`` takes the output's copy and the output; without it
    # the former is copied to the latter
    is_copied: bool = False


def addresses_of(call: Call) -> Callable[[Any, Any], Any] | None:
    """Return a function that returns the elements of a call's first tensor and the tensors' addresses, in order.

    Of a tensor and a list, the tensor is first. None for two tensors, or one.
    """
    is_read, is_written = call.send.__class__ is TensorList, call.recv.__class__ is TensorList
    if is_read and is_written:
        return lambda send, recv: (send[0].numel(), *map(data_ptr, send), *map(data_ptr, recv))
    if is_read:
        return lambda send, recv: (recv.numel(), recv.data_ptr(), *map(data_ptr, send))
    if is_written:
        return lambda send, recv: (send.numel(), send.data_ptr(), *map(data_ptr, recv))
    return (lambda _, recv: (recv.numel(), recv.data_ptr())) if call.send is None else None


def run_again(call: Call, run: Callable[[Call], None]) -> Run:
    """Return a function that runs a collective again in the general way."""

    def again(send: Any, recv: Any) -> None:
        check_memory(*tensors_of(send, recv))
        run(call.on(send, recv))

    return again


def repeat(
    call: Call,
    said: int,
    prepared: Prepared,
    carry_out: Callable[[Call], None],
    check: CallCheck | None,
    communicator: Communicator,
) -> Run:
    """Return a function that runs a collective again, checked; ``said`` is its word without root (``call_check``)."""
    function, describe, follow, is_copied = prepared
    name, failure, places_of = call.row.name, communicator.failure, addresses_of(call)
    is_one = call.recv is call.send or call.recv is None
    fixed = size_of(call, communicator.rank, communicator.size)
    first = with_root(said, call)
    # by addresses: MPI's arguments, a share's elements, and the word without number; a barrier's from the start
    known: dict[Any, tuple[tuple[Any, ...], int, int]] = {None: ((None, None), fixed, with_size(first, fixed))}
    last_size = -1
    board = None if check is None else check.board
    counts = None if 0 <= fixed < COUNTED else counts_of(call)
    is_checked = board is not None and counts is None
    checks: Any = check
    log = None if check is None else check.log
    # the first call opens the board, and some shares are compared by MPI
    if check is not None and (not check.is_open or (check.compares_shares and call.row in EXCHANGES)):
        return run_again(call, lambda made: check.run(made, said))
    if board is not None:
        whats, sizes, decided = board.whats[board.own], board.sizes[board.own], board.decided
        begin_fence, end_fence, are_many = board.begin_fence, board.end_fence, board.are_many
        others = [] if are_many else [words for words, _ in board.others]

    def run(send: Any, recv: Any) -> None:
        nonlocal last_size
        places: Any
        arguments: tuple[Any, ...] | None
        if describe is None:
            places = None
        elif places_of is not None:
            places = places_of(send, recv)
        else:
            count, place = send.shape if is_copied else send.numel(), send.data_ptr()
            places = (count, place) if is_one else (count, place, recv.data_ptr())
        if (found := known.get(places)) is not None:
            arguments, size, base = found
        else:
            assert describe is not None
            if min(places[1:]) < LOWEST_PLACE:
                check_memory(*tensors_of(send, recv))
            arguments, size = describe(places)
            base = with_size(first, size)
            if arguments is not None:  # else it may change when the ranks exchange their nodes
                if len(known) >= (PLACES_KEPT if places_of is None else LISTS_KEPT):
                    known.clear()
                known[places] = arguments, size, base
        if is_copied and arguments is not None:
            values, filling, result, arguments = arguments
            if filling is None:
                values.copy_(send)
            else:
                bits, written, given = filling
                bits.fill(0)
                written[...] = given
        if is_checked:
            if log is not None and (size != last_size or log.failure is not None):
                last_size = size
                checks.make(first, size, lambda: carry_out(call.on(send, recv)))
                return
            checks.number = number = checks.number + 1
            if log is not None and not number % BLOCK:
                log.turn(number)
            at, wide = number & LAST, size >= SIZES
            if wide or log is not None or are_many:
                sizes[at] = size
            whats[at] = word = base + (number & NUMBER)
            begin_fence()
            end_fence()
            if are_many and not checks.is_clear(number):
                checks.fail(number, lambda: carry_out(call.on(send, recv)))
            for theirs in others:
                if (
                    ((seen := theirs[at]) != word or wide)
                    and (not number % BLOCK or not (seen - number) & NUMBER)
                    and not checks.is_clear(number)
                ):
                    checks.fail(number, lambda: carry_out(call.on(send, recv)))
        try:
            if arguments is None:
                carry_out(call.on(send, recv))
            else:
                function(*arguments)
                if follow is None:
                    if is_copied and recv is not None:
                        recv.copy_(result)
                elif is_copied:
                    follow(result, recv)
                else:
                    follow(recv)
        except BaseException as error:
            translated = failure(name, error) if isinstance(error, MPI.Exception) else error
            if is_checked:
                checks.ended_by(translated, number)
            if translated is error:
                raise
            raise translated from error
        finally:  # if it failed because another rank took part with memory of its own, the difference is the reason
            if is_checked:
                if decided[0] != checks.handled:
                    checks.look_back(number)
                if log is not None:
                    log.check()

    def run_with_counts(send: Any, recv: Any) -> None:  # the outputs, the same as before
        check_memory(*tensors_of(send, recv))
        checks.make(first, fixed, partial(run, send, recv), counts)

    return run if board is None or counts is None else run_with_counts
