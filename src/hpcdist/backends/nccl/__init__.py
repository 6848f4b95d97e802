"""NCCL, by nccl4py: the backend of CUDA tensors."""
