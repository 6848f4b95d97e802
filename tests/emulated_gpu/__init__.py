"""Emulated GPUs: CUDA's driver and runtime and NCCL, replaced under an unchanged torch and nccl4py.

``build`` compiles them, ``load`` puts them under torch, ``plugin`` makes what breaks CUDA's rules fail a pytest test, and
``python -m emulated_gpu PROGRAM`` runs a program on them. README.md says what is faithful and what is not.
"""
