"""Heat conduction on a square plate: an HPC code that owns MPI and uses hpcdist as a library.

    mpirun -n 4 python heat2d.py --size 128 --steps 500

The plate is divided into bands of rows. Each step exchanges the edge rows with the neighbours
(``HaloExchange`` on NumPy arrays) and every now and then sums the residual (``all_reduce``). With
``--check`` rank 0 computes the whole plate too and compares.
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI  # this code starts and ends MPI itself

import hpcdist as dist

HOT, COLD = 100.0, 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="rows and columns of the plate")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks at the residual")
    parser.add_argument("--check", action="store_true", help="compare with the serial result")
    return parser.parse_args()


def plate(size: int) -> np.ndarray:
    """Return the cold plate, hot along its upper edge."""
    field = np.full((size, size), COLD)
    field[0] = HOT
    return field


def relax(field: np.ndarray) -> np.ndarray:
    """Return the inner points after one Jacobi step."""
    return 0.25 * (field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:])


def band(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first and the last-but-one of a rank's inner rows."""
    inner = size - 2
    start = 1 + rank * inner // ranks
    return start, 1 + (rank + 1) * inner // ranks


def serial(size: int, steps: int) -> np.ndarray:
    """Compute the whole plate on one rank."""
    field = plate(size)
    for _ in range(steps):
        field[1:-1, 1:-1] = relax(field)
    return field


def main() -> None:
    options = arguments()
    dist.init_process_group(comm=MPI.COMM_WORLD)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > options.size - 2:
        raise SystemExit(f"--size {options.size} has fewer inner rows than there are ranks ({ranks})")
    first, end = band(options.size, rank, ranks)
    field = plate(options.size)[first - 1 : end + 1].copy()  # the band and a row on each side
    halo = dist.HaloExchange([ranks, 1], width=[1, 0])  # columns are not divided
    if rank == 0:
        print(f"{options.size} x {options.size} points in {ranks} bands")
        print(f"{'step':>6} {'residual':>12}")
    for step in range(1, options.steps + 1):
        halo(field)
        inner = relax(field)
        if step % options.every == 0 or step == options.steps:
            residual = np.array([np.square(inner - field[1:-1, 1:-1]).sum()])
            dist.all_reduce(residual)
            if rank == 0:
                print(f"{step:6d} {np.sqrt(residual[0]):12.3e}", flush=True)
        field[1:-1, 1:-1] = inner
    bands, _ = dist.all_gather_varied(field[1:-1])
    if options.check and rank == 0:
        whole = plate(options.size)
        whole[1:-1] = bands
        difference = np.abs(whole - serial(options.size, options.steps)).max()
        print(f"largest difference to the serial result {difference:.1e}")
        if not difference <= 1e-12:
            raise SystemExit("the parallel result differs from the serial one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
