"""MPI, through mpi4py: the backend of CPU tensors if the cluster has one.

mpi4py initialises MPI when ``mpi4py.MPI`` is imported unless told otherwise. Importing this package tells it,
so that ``runtime`` decides when MPI starts and ends; a program that imported ``mpi4py.MPI`` before keeps its own.
"""

import sys

from mpi4py import rc

if "mpi4py.MPI" not in sys.modules:
    rc.initialize = False
    rc.finalize = False
