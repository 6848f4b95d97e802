"""The engine: what a collective, a group and a backend are. It knows no MPI, no NCCL and no environment variable."""
