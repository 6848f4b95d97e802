"""MPI, through mpi4py: the backend of CPU tensors where the cluster has one.

Every module below imports ``mpi4py.MPI``, which would initialise MPI with the import: that is switched off here, once.
"""

import contextlib
import sys

if "mpi4py.MPI" not in sys.modules:
    with contextlib.suppress(ImportError):  # ``runtime.load`` says what is missing
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
