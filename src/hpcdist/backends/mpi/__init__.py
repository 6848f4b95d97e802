"""MPI, through mpi4py: the backend of CPU tensors where the cluster has one."""
