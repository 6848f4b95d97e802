"""Runs every code block of README and docs; ``code_blocks`` explains the marks of a block."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

import hpcdist
from hpcdist.cli import main as cli_main
from hpcdist.cli import submit
from hpcdist.cli.main import COMMANDS
from tests import forked, programs
from tests.docs.code_blocks import NOT_RUN, ROOT, Block, blocks, pages

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
WITH_CODE = [name for name, page in PAGES.items() if blocks(page)]
pytestmark = pytest.mark.timeout(1200)
SECONDS = 240


def has(name: str) -> bool:
    """Tell whether hpcdist or this machine has what a block needs."""
    if name == "gpu":
        return torch.cuda.is_available()
    modules = (f"hpcdist.{name}", name)
    return hasattr(hpcdist, name) or any(importlib.util.find_spec(module) is not None for module in modules)


def is_first_page(block: Block) -> bool:
    """Tell whether a block is on the page whose programs are started as a user starts them."""
    return block.page.name == "README.md"


def python(block: Block) -> list[str]:
    """Return the words that start Python."""
    return [sys.executable] if is_first_page(block) else forked.python()


def command(block: Block) -> list[str]:
    """Return what runs a block."""
    if block.language == "bash":
        return ["bash", "-euo", "pipefail", "-c", block.text]
    if "torchrun" in block.settings:
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", block.settings["torchrun"]]
        return [*run, "block.py"]
    if "mpirun" in block.settings:
        tolerant = ["--with-ft", "ulfm"] if "ulfm" in block.words else []
        return programs.mpirun_command(int(block.settings["mpirun"]), ["block.py"], tolerant, python(block))
    return [*python(block), "block.py"]


@pytest.fixture
def folder(tmp_path):
    """A folder in which ``slurm/`` is where a checkout has it."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.quick if each == "README.md" else ()) for each in WITH_CODE]
)
def test_blocks_of(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    skipped = []
    for block in blocks(PAGES[name]):
        if block.language == "python":
            compile(block.text, block.place, "exec")
        if "file" in block.settings:
            (folder / block.settings["file"]).write_text(block.text)
            continue
        if block.words & NOT_RUN:
            read = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True, timeout=30)
            assert read.returncode == 0, f"{block.place}: {read.stderr}"
            if "parsed" in block.words:
                parse(block)
            continue
        if not has(block.settings.get("needs", "init_process_group")):
            skipped.append(f"{block.place} needs {block.settings['needs']}")
            continue
        if "ulfm" in block.words and programs.LIBRARY != "openmpi":
            skipped.append(f"{block.place} needs Open MPI")
            continue
        if ("mpirun" in block.settings or "mpirun" in block.text) and not programs.MPIRUN.exists():
            skipped.append(f"{block.place} needs mpirun")
            continue
        (folder / "block.py").write_text(block.text)
        run(block, folder)
    if skipped:
        pytest.skip("; ".join(skipped))


def parse(block: Block) -> None:
    """Have each command of hpcdist in a block read its arguments."""
    lines = [line for line in block.text.splitlines() if "-m hpcdist" in line]
    assert lines, f"{block.place}: no command of hpcdist"
    for line in lines:
        name, *words = shlex.split(line.partition("-m hpcdist ")[2].partition(" > ")[0])
        if name == "submit":
            assert submit.parse(words)[1] or "--help" in words, f"{block.place}: {line}"
        elif name not in COMMANDS:
            assert cli_main.main([name, *words]) == 0, f"{block.place}: {line}"
        else:
            status, others = 0, []
            try:
                _, others = cli_main.module_of(name).parser().parse_known_args(words)
            except SystemExit as ended:  # the help, or an error
                status = ended.code
            assert status == 0, f"{block.place}: {line}"
            assert name == "demo" or not others, f"{block.place}: {line}"  # the demo's script takes others


def run(block: Block, folder) -> None:
    """Run one block to its end."""
    first = [] if is_first_page(block) else [str(forked.folder_with_python(folder / ".bin"))]
    variables = {
        "PATH": os.pathsep.join([*first, str(programs.BIN), os.environ.get("PATH", "/usr/bin:/bin")]),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # as many ranks as a page says, on any machine
    }
    done = programs.run(command(block), SECONDS, folder, **variables)
    ended_well = done.returncode == 0
    assert ended_well is ("fails" not in block.words), (
        f"{block.place} ended with {done.returncode}\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    )


@pytest.mark.parametrize("name", WITH_CODE)
def test_files_that_a_page_writes_are_started_on_it(name):
    found = blocks(PAGES[name])
    for index, block in enumerate(found):
        if written := block.settings.get("file"):
            later = [each for each in found[index + 1 :] if each.language == "bash" and written in each.text]
            assert later, f"{block.place}: no later block starts {written}"


def test_what_a_page_names_is_there():
    """Templates and commands in blocks that are not run exist at least."""
    for page in PAGES.values():
        for block in blocks(page):
            lines = [line.split() for line in block.text.splitlines()]
            for word, after in (pair for words in lines if words for pair in zip(words, [*words[1:], ""], strict=True)):
                if word.startswith("slurm/"):
                    assert (ROOT / word.rstrip("`,;")).exists(), f"{block.place}: {word}"
                if word == "hpcdist" and block.language == "bash" and after.isalpha():
                    needs = block.settings.get("needs")
                    assert after in COMMANDS or (needs and not has(needs)), f"{block.place}: hpcdist {after}"


def test_shellcheck():
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("no shellcheck here")
    for page in PAGES.values():
        for block in blocks(page):
            if block.language == "bash":
                done = subprocess.run(
                    [checker, "--shell=bash", "--severity=warning", "--exclude=SC1090,SC1091", "-"],
                    input=block.text,
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert done.returncode == 0, f"{block.place}\n{done.stdout}"
