"""The limit of open files in the process that ranks connect to: each connection is one."""

from __future__ import annotations

import os
import resource
import sys
import warnings

from stratagem.errors import ConfigurationError

_AT_LEAST = 2
"""Connections of a rank to the store: its process group's, and the one that it waits by."""
_AT_MOST = 3
"""With that of a save in the background."""
_OWN = 16
"""Files that any such process has open."""
_OTHERS = 256
"""Files that it may open besides: data, workers, logs."""


def allow_connections(world_size: int) -> None:
    """Raise this process's soft limit of open files, where it is too low for its ranks.

    Args:
        world_size: the number of ranks that connect to the store that this process holds.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = _AT_LEAST * world_size + _OWN, _AT_MOST * world_size + _OTHERS
    if _suffices(soft, wanted):
        return
    if not _suffices(hard, needed):
        raise ConfigurationError(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and its hard limit is {hard}: raise it (`ulimit -Hn`, LimitNOFILE= of "
            "systemd, PropagateResourceLimits= of SLURM)"
        )
    raised = wanted if _suffices(hard, wanted) else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def warn_of_agents_limit(world_size: int) -> None:
    """Warn on rank 0 where the process that started it holds the store, and cannot open enough."""
    if sys.platform != "linux":
        return
    try:
        soft, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:
        return  # another user's
    needed = _AT_LEAST * world_size + _OWN
    if not _suffices(soft, needed):
        warnings.warn(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and the limit of the launcher's (process {os.getppid()}) is {soft}: "
            f"ranks beyond it would wait in vain. Call `ulimit -n {needed}` before the launcher",
            stacklevel=2,
        )


def _suffices(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
