"""MPI in this process: its start and end, threads, shared memory files, and the death of other processes."""
