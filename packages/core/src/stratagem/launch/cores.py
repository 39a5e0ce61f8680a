"""How many cores and threads a rank gets."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_bound(cores: int) -> bool:
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        return cores < len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False  # it belongs to somebody else, or has ended


def threads_per_rank(local_world_size: int) -> str:
    """Return OMP_NUM_THREADS for each of the ranks that share this node's cores.

    A process that may use fewer cores than its parent has been given its own (srun and mpirun bind
    tasks to cores); the others divide what there is.
    """
    cores = available_cores()
    threads = cores if _is_bound(cores) else max(1, cores // local_world_size)
    return os.environ.get("OMP_NUM_THREADS") or str(threads)
