"""Slurm's compressed lists of hosts and tasks, expanded, and the host of each rank.

``python-hostlist`` parses the notation; this module explains its errors and assigns ranks to hosts. ``scontrol`` could
do it too, but compute nodes and containers may not have it.
"""

from __future__ import annotations

import hostlist as library

DISTRIBUTIONS = ("block", "cyclic")


def expand(names: str) -> list[str]:
    """Expand a list of hosts such as ``n[08-10,12],gpu1``, in its order.

    Args:
        names: as in ``SLURM_STEP_NODELIST``; zeros in front of a number are kept.

    Returns:
        The hosts, one name each; none for an empty list.

    Raises:
        ValueError: The list cannot be read, or stands for more hosts than any cluster has.
    """
    try:
        return library.expand_hostlist(names, allow_duplicates=True)
    except library.BadHostlist as error:
        raise ValueError(
            f"cannot read the host list {names!r}: {error}; expected names and ranges such as 'n[08-10,12],gpu1'"
        ) from error


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Expand Slurm's number of tasks on each node, such as ``2(x3),1`` for 2, 2, 2, 1.

    Args:
        tasks_per_node: as in ``SLURM_STEP_TASKS_PER_NODE``.

    Returns:
        The number of tasks of each node, in the order of the nodes.

    Raises:
        ValueError: The notation cannot be read.
    """
    try:
        return library.parse_slurm_tasks_per_node(tasks_per_node)
    except library.BadHostlist as error:
        raise ValueError(
            f"cannot read the tasks per node {tasks_per_node!r}: {error}; expected counts such as '2(x3),1'"
        ) from error


def host_of_each_rank(names: str, tasks_per_node: str, distribution: str = "block") -> list[str]:
    """Say on which host each rank of a step runs.

    Args:
        names: the step's hosts, as in ``SLURM_STEP_NODELIST``.
        tasks_per_node: the step's tasks, as in ``SLURM_STEP_TASKS_PER_NODE``.
        distribution: ``block`` fills one node after the other (Slurm's default), ``cyclic`` goes round the nodes
            (``SLURM_DISTRIBUTION``, srun's ``--distribution``); what follows a colon or comma is about cores within a
            node, and is ignored.

    Returns:
        The host of rank 0, of rank 1 and so on.

    Raises:
        ValueError: One of the lists cannot be read, they are of different lengths, or the distribution is another
            one (``plane`` and ``arbitrary`` do not follow from these lists).
    """
    hosts, tasks = expand(names), expand_tasks(tasks_per_node)
    if len(hosts) != len(tasks):
        raise ValueError(
            f"the host list {names!r} has {len(hosts)} hosts, the tasks per node {tasks_per_node!r} are for "
            f"{len(tasks)}; both must come from the same step (SLURM_STEP_*, not SLURM_JOB_*)"
        )
    order = distribution.replace(",", ":").partition(":")[0].lower()
    if order not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r} says nothing about hosts (known: {', '.join(DISTRIBUTIONS)})")
    if order == "block":
        return [host for host, count in zip(hosts, tasks, strict=True) for _ in range(count)]
    return [
        host for turn in range(max(tasks, default=0)) for host, count in zip(hosts, tasks, strict=True) if turn < count
    ]
