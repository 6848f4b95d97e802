"""Debugger of one rank: pdb on the terminal from which the job was started.

The launcher forwards a pipe to the standard input of one rank, and its output line by line. So the prompt ends with a
newline if the input is not a terminal; otherwise it would be shown only with the answer.
"""

from __future__ import annotations

import bdb
import pdb
import sys
from traceback import walk_stack
from types import FrameType

HINT = (
    "What is typed reaches rank 0 under mpirun, others by Open MPI's `mpirun --stdin {rank}` (MPICH's has no such "
    "option), and all ranks, or one by `--input={rank}`, under srun."
)


class RankDebugger(pdb.Pdb):
    """pdb on one rank, which stops at the line that opens it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.has_terminal = sys.stdin is not None and sys.stdin.isatty()
        self.has_input = True
        if not self.has_terminal:
            self.use_rawinput = False
            self.prompt = f"(Pdb of rank {rank})\n"

    def open(self, frame: FrameType) -> None:
        """Open the prompt at a frame, until a command continues the program; bdb.BdbQuit for ``quit``."""
        self.message(f"\n!!! ATTENTION !!!\n\nThis is rank {self.rank}, in the line that called breakpoint.")
        if not self.has_terminal:
            self.message(HINT.format(rank=self.rank))
        self.reset()
        *_, (self.botframe, _) = walk_stack(frame)  # where stepping ends
        self.interaction(frame, None)
        if self.quitting and self.has_input:
            raise bdb.BdbQuit

    def go_on(self, frame: FrameType) -> None:
        """Step or continue, as the last command says, from the frame's next line."""
        if self.has_input and (self.stoplineno != -1 or self.breaks):
            for each, _ in walk_stack(frame):
                each.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)

    def do_EOF(self, arg: str) -> bool | None:
        """Continue: the launcher forwards no input to this rank."""
        self.has_input = False
        self.message(f"rank {self.rank} has no input, and goes on")
        return self.do_continue(arg)
