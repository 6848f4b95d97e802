"""Runner on emulated GPUs: ``python -m tests.emulated_gpu PROGRAM.py …``, or ``-m MODULE …`` for a module."""

import runpy
import sys

import tests.emulated_gpu.load  # noqa: F401  # before torch

arguments = sys.argv[1:]
if not arguments:
    sys.exit(__doc__)
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
