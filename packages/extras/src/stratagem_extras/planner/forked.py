"""A map over forked processes, for work on objects that cannot be sent to another process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_shared: list[Callable[[int], Any]] = []
"""In a forked process: the function to call."""


def forked_map(function: Callable[[int], Result], count: int, processes: int) -> Sequence[Result]:
    """Return `function(0), ..., function(count - 1)`, computed in forked processes.

    The function is inherited, and so may hold anything. What it returns is pickled. The caller's
    process computes the results itself if it cannot fork, if torch was built for an accelerator,
    since threads of autograd do not survive a fork then, and if a forked process ends early.

    Args:
        function: called with each number once.
        count: how many numbers.
        processes: the largest number of processes; 1: the caller's alone.

    Example:
        >>> list(forked_map(lambda number: number * number, 4, processes=2))
        [0, 1, 4, 9]
    """
    processes = min(processes, count)
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if processes > 1 and can_fork and torch.accelerator.current_accelerator() is None:
        try:
            with ProcessPoolExecutor(
                processes, multiprocessing.get_context("fork"), _begin, (function,)
            ) as pool:
                return list(pool.map(_call, range(count)))
        except BrokenProcessPool:
            pass  # such as for want of memory
    return [function(number) for number in range(count)]


def _begin(function: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)  # threads of the parent's kernels do not exist here
    _shared.append(function)


def _call(number: int) -> Any:
    return _shared[-1](number)
