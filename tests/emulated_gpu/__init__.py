"""Emulated GPUs: CUDA's driver and runtime and NCCL, replaced under an unchanged torch and nccl4py.

``build`` compiles them, ``load`` puts them under torch, ``plugin`` makes what breaks CUDA's rules fail a pytest test,
``mutants`` breaks the NCCL backend on purpose, and ``python -m tests.emulated_gpu PROGRAM`` runs a program. README.md
says what is faithful and what is not.
"""
