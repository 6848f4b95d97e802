"""MPI in this process: its start and end, threads, shared memory files, and what it does when a process dies."""
