"""Return freed memory to the system, so that sharding saves memory on CPU too.

FSDP allocates and frees whole parameters at every group. Once a block of up to 32 MiB was freed,
glibc keeps such blocks for later use, but finds no use for them: torch asks for aligned blocks, for
which glibc before 2.38 wants a free block that is larger than the one that was freed. The heap
grows to the size of an unsharded model.

A fixed threshold (`M_MMAP_THRESHOLD`) gives each large block back when it is freed. Fresh memory
then costs page faults, which doubled the time of a step; torch's own switch for huge pages
(`THP_MEM_ALLOC_ENABLE`) makes them 10 times fewer. 100.7M parameters with Adam, two ranks, one
thread each, glibc 2.36, Linux 6.18, peak MB and CPU seconds a step of rank 0:

==========================================  =====  ====
ddp                                          2339  0.7
fsdp, as glibc does it                       2134  2.0
fsdp, threshold of 4 MiB                     1186  2.9
fsdp, huge pages                             1458  1.3
**fsdp, threshold of 4 MiB, huge pages**     1188  1.6
==========================================  =====  ====

A threshold of 1 MiB gave the same result as 4 MiB; 16 MiB was worse (1266). One arena for all
threads (`M_ARENA_MAX=1`) changed nothing (2305). With `malloc_trim` after each step, peaks within
a step remained (1733, 2.4 s). `benchmarks/memory.py` measures the settings used here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from typing import Any

_M_MMAP_THRESHOLD = -3
THRESHOLD = 4 * 2**20
"""Blocks of at least this many bytes are returned to the system when they are freed."""

HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""The environment variable that torch reads once, at a process's first tensor."""


def use_huge_pages() -> None:
    """Let torch use huge pages in this process and in its child processes.

    In this process it takes effect only before the first tensor. Nothing changes if the system has
    no huge pages, or if the user has set the variable.

    Example:
        >>> from stratagem.strategies import use_huge_pages
        >>> use_huge_pages()
        >>> os.environ[HUGE_PAGES_VARIABLE]
        '1'
    """
    os.environ.setdefault(HUGE_PAGES_VARIABLE, "1")


@lru_cache
def return_freed_memory() -> bool:
    """Make glibc return large freed blocks to the system; return whether it does.

    The threshold is set once per process. False: the allocator is not glibc's, or the user has set
    the threshold.
    """
    if _set_by_user() or not sys.platform.startswith("linux"):
        return False
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False  # musl, for one
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, THRESHOLD))


def _set_by_user() -> bool:
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc.mmap_threshold" in (
        os.environ.get("GLIBC_TUNABLES", "")
    )
