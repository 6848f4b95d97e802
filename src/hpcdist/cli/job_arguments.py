"""Argument parser for commands that every rank of a job runs: only rank 0 prints help and errors."""

from __future__ import annotations

import argparse
from typing import IO, NoReturn

from hpcdist.launch import environment


def is_speaker() -> bool:
    """Tell whether this process prints for its job: it is rank 0, or no launcher started it."""
    launch = environment.detect()
    return launch is None or launch.rank == 0


class JobParser(argparse.ArgumentParser):
    """Prints help and errors once a job; every rank exits with the same status."""

    def print_usage(self, file: IO[str] | None = None) -> None:  # type: ignore[override]  # typeshed's own Protocol
        """Print how the command is called."""
        if is_speaker():
            super().print_usage(file)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print what the command takes."""
        if is_speaker():
            super().print_help(file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End this process."""
        super().exit(status, message if is_speaker() else None)
