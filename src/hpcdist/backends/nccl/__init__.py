"""NCCL, by nccl4py: how a group carries CUDA tensors."""
