"""MPI, through mpi4py: the backend of CPU tensors if the cluster has an MPI.

mpi4py initializes MPI when ``mpi4py.MPI`` is imported, unless its settings forbid it. Importing this package sets
them, so that ``runtime`` decides when MPI starts and ends; in a program that has imported ``mpi4py.MPI`` before,
the program's own MPI stays as it is.
"""

import sys

from mpi4py import rc

if "mpi4py.MPI" not in sys.modules:
    rc.initialize = False
    rc.finalize = False
