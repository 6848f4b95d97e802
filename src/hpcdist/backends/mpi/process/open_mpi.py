"""Open MPI's start: the eager limit of messages within a node, the launchers that it knows, and the component btl/ofi.

On one node btl/ofi is excluded while MPI starts, where it only costs a second: its close function sleeps for that time
("if we don't sleep, sockets provider freaks out"). Open MPI closes it in MPI_Init on a node without a device for it,
and in MPI_Finalize on the others; 4.1 does too unless a file of parameters excludes it, as Debian's does. Between the
ranks of a node messages go through shared memory (btl/sm, before Open MPI 5 btl/vader), with or without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.backends.mpi.process.libraries import loaded_library
from hpcdist.launch.environment import integer

VENDOR = "Open MPI"
SLEEP_SECONDS = 1.0
VARIABLE, VALUE = "OMPI_MCA_btl", "^ofi"
# variables that choose a network, or other files of parameters than those below
CHOICES = (VARIABLE, "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_param_files")
CHOICE_IN_FILE = re.compile(r"^\s*(btl|pml|mtl)\s*=\s*(\S*)", re.MULTILINE)
FILES = ("openmpi-mca-params.conf", "openmpi-mca-params-override.conf")

# launchers of Open MPI: a variable that they set for each rank, one that counts nodes or ranks, and its value if all
# ranks are on one node: a number, or the variable that has it
LAYOUTS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_NNODES", "1"),
    ("SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "1"),
)
OWN_CONNECTION = "PMIX_NAMESPACE"  # set by each of them, and by launchers that are not in the table

# components of Open MPI 4 by which ranks reach their launcher; s1 and s2 are Slurm's own PMI-1 and PMI-2, and Cray's
# PMI works under srun too
CONNECTIONS, OF_SRUN = "openmpi*/**/mca_pmix_*.so", ("mca_pmix_s1.so", "mca_pmix_s2.so", "mca_pmix_cray.so")


def copy_small_messages(MPI: Any) -> None:
    """Let Open MPI copy messages of up to 32 KiB within a node through shared memory, unless the user has chosen.

    Longer ones are read from the sender's memory. So from 4 to 32 KiB they take 1.5 to 2.8 times less, and are cut to
    the buffer that receives them (known issues).
    """
    name, version = MPI.get_vendor()
    if name == VENDOR:
        component = "sm" if version >= (5,) else "vader"
        os.environ.setdefault(f"OMPI_MCA_btl_{component}_eager_limit", str(32 << 10))


def knows_only_pmix(library: str | None) -> bool:
    """Tell whether an Open MPI 4 is built without Slurm's or Cray's own PMI; False too without files of components."""
    names = [each.name for each in Path(library).resolve().parent.glob(CONNECTIONS)] if library else []
    return bool(names) and not any(name in OF_SRUN for name in names)


def is_on_one_node(environment: Mapping[str, str]) -> bool:
    """Tell whether all ranks are on one node, by the launcher's variables, the same on all of them."""
    for mark, counted, expected in LAYOUTS:
        if mark in environment:
            count = integer(environment, counted)
            return count is not None and count == (
                int(expected) if expected.isdigit() else integer(environment, expected)
            )
    return OWN_CONNECTION not in environment  # a single process


def folders(environment: Mapping[str, str], library: str | None) -> Iterator[Path]:
    """Yield the folders that may contain a site's files of parameters."""
    if prefix := environment.get("OPAL_PREFIX"):
        yield Path(prefix, "etc")
    if library is not None:
        yield Path(library).resolve().parents[1] / "etc"
        if library.startswith("/usr/"):  # of Linux distributions
            yield from Path("/etc").glob("openmpi*")


def choices_in_files(environment: Mapping[str, str], library: str | None) -> list[tuple[str, str]]:
    """Return the names and values by which the user or the site chose Open MPI's networks in files of parameters."""
    files = [folder / name for folder in folders(environment, library) for name in FILES]
    if home := environment.get("HOME"):
        files.append(Path(home, ".openmpi", "mca-params.conf"))
    readable = (each for each in files if os.path.isfile(each) and os.access(each, os.R_OK))
    return [choice for each in readable for choice in CHOICE_IN_FILE.findall(each.read_text(errors="replace"))]


def is_chosen(environment: Mapping[str, str], library: str | None) -> bool:
    """Tell whether the user or the site has chosen Open MPI's networks, by a variable or in a file of parameters."""
    return any(environment.get(name) for name in CHOICES) or bool(choices_in_files(environment, library))


def opens_btl_ofi(environment: Mapping[str, str], library: str | None) -> bool:
    """Tell whether Open MPI opens btl/ofi: no list of a variable or a file leaves it out."""
    lists = [environment.get(VARIABLE, ""), *(v for name, v in choices_in_files(environment, library) if name == "btl")]
    return all(("ofi" in each.lstrip("^").split(",")) != each.startswith("^") for each in lists if each)


def can_do_without(MPI: Any) -> bool:
    """Tell whether btl/ofi may be excluded: Open MPI, all ranks on one node, and no choice of user or site."""
    return MPI.get_vendor()[0] == VENDOR and is_on_one_node(os.environ) and not is_chosen(os.environ, loaded_library())


def is_used(MPI: Any) -> bool:
    """Tell whether the MPI that hpcdist started has opened btl/ofi."""
    return MPI.get_vendor()[0] == VENDOR and not can_do_without(MPI) and opens_btl_ofi(os.environ, loaded_library())


@contextmanager
def without_btl_ofi(MPI: Any) -> Iterator[None]:
    """Exclude btl/ofi from the MPI that starts inside, if it is not needed.

    The variable is removed afterwards: an mpirun that the program starts may use other nodes.
    """
    if not can_do_without(MPI):
        yield
        return
    os.environ[VARIABLE] = VALUE
    try:
        yield
    finally:
        del os.environ[VARIABLE]
