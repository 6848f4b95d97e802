"""Compiler of the emulated GPUs: ``python -m tests.emulated_gpu.build`` makes the libraries with the system's g++.

The entry points of CUDA's runtime and of NCCL that nobody wrote are made too, from the names in the real libraries;
each fails and says its name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
SITE = Path(sysconfig.get_paths()["purelib"])
BUILT = Path(os.environ.get("EMULATED_GPU_LIBRARIES", Path(sys.prefix) / "emulated_gpu"))

CUDA, RUNTIME, NCCL, OPERATORS = "libcuda.so.1", "libcudart.so.13", "libnccl.so.2", "operators.so"
PARTS = {
    CUDA: ("devices", "memory", "streams", "graphs", "driver"),
    RUNTIME: ("runtime",),
    NCCL: ("nccl", "segment"),
    OPERATORS: ("operators",),
}
REAL = {RUNTIME: ("nvidia/cu13/lib", ("cuda", "__cuda")), NCCL: ("nvidia/nccl/lib", ("nccl",))}
FLAGS = ("-fPIC", "-g1", "-fvisibility=hidden", f"-I{SOURCE}")


def missing() -> str | None:
    """Return what is missing to build them, or None."""
    if shutil.which("g++") is None:
        return "no C++ compiler (g++)"
    lacks = [name for name, (folder, _) in REAL.items() if not (SITE / folder / name).exists()]
    return f"{SITE} has no {', '.join(lacks)}: not the CUDA 13 build of torch" if lacks else None


def run(*command: str | Path) -> str:
    """Run a command and return what it prints; its errors are shown when it fails."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def compile_part(name: str) -> None:
    """Compile one source file, if it or a header is newer than its object."""
    target = BUILT / f"{name}.o"
    newest = max(each.stat().st_mtime for each in [*SOURCE.rglob("*.h"), SOURCE / f"{name}.cpp"])
    if target.exists() and target.stat().st_mtime > newest:
        return
    flags = ["-std=c++17", "-O2", "-Wall", "-Werror"]
    if name == "operators":
        torch = SITE / "torch" / "include"
        flags = ["-std=c++20", "-O1", "-w", f"-I{SOURCE}/torch_needs", f"-I{torch}"]
        flags.append(f"-I{torch}/torch/csrc/api/include")
    run("g++", *flags, *FLAGS, "-c", SOURCE / f"{name}.cpp", "-o", target)


def entry_points(path: Path, *options: str) -> set[str]:
    """Return the functions that a library or object defines."""
    lines = [line.split() for line in run("nm", "--defined-only", *options, path).splitlines()]
    return {words[2].split("@")[0] for words in lines if len(words) == 3 and words[1] in "TW"}


def compile_stubs(library: str) -> Path:
    """Compile the entry points of a real library that ours lacks."""
    folder, prefixes = REAL[library]
    ours = set().union(*(entry_points(BUILT / f"{part}.o") for part in PARTS[library]))
    names = sorted(each for each in entry_points(SITE / folder / library, "-D") - ours if each.startswith(prefixes))
    text = BUILT / f"{library}.stubs.cpp"
    text.write_text(
        'extern "C" int emulated_gpu_missing(const char*);\n'
        + "".join(
            f'extern "C" __attribute__((visibility("default"))) int {name}() '
            f'{{ return emulated_gpu_missing("{name}"); }}\n'
            for name in names
        )
    )
    made = text.with_suffix(".o")
    run("g++", "-fPIC", "-c", text, "-o", made)
    return made


def link(library: str) -> None:
    """Link one library."""
    target = BUILT / library
    objects = [BUILT / f"{part}.o" for part in PARTS[library]]
    if target.exists() and target.stat().st_mtime > max(each.stat().st_mtime for each in objects):
        return
    options: list[str | Path] = [f"-Wl,-soname,{library}", "-Wl,-rpath,$ORIGIN"]
    if library in REAL:
        objects.append(compile_stubs(library))
    if library == RUNTIME:  # its names are versioned
        script = BUILT / "cudart.map"
        script.write_text("libcudart.so.13 { global: cuda*; __cuda*; local: *; };\n")
        options.append(f"-Wl,--version-script={script}")
    if library == OPERATORS:
        torch = SITE / "torch" / "lib"
        options += [
            f"-L{torch}",
            "-ltorch_cpu",
            "-lc10_cuda",
            "-lc10",
            f"-Wl,-rpath,{torch}",
            "-Wl,--allow-shlib-undefined",
        ]
    if library != CUDA:
        options.append(BUILT / CUDA)
    temporary = target.with_suffix(".new")
    run("g++", "-shared", "-o", temporary, *objects, *options, "-lpthread", "-ldl", "-lrt")
    temporary.replace(target)


def build() -> Path:
    """Build what is out of date and return the folder of the libraries."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # torch's headers take longest
        list(
            pool.map(
                compile_part,
                ["operators", *(part for parts in PARTS.values() for part in parts[:5] if part != "operators")],
            )
        )
    for library in PARTS:
        link(library)
    return BUILT


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"the emulated GPUs cannot be built: {reason}")
    print(build())
