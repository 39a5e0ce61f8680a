"""Forks of this process that share its pieces of work."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Divide = Callable[[int, Callable[[int], Any]], list[Any]]
"""Returns `[piece(0), piece(1), ...]`, given the number of pieces and `piece`."""

_MOST_PROCESSES = 8
_LONGEST_WAIT = 120.0
"""Seconds for the last piece of a fork, when all others are done."""
_MOST_PIECES = 255
"""A number of a piece is a byte, so that no process reads a part of one."""


def in_turn(count: int, piece: Callable[[int], T]) -> list[T]:
    """Return all pieces; a `Divide` of one process.

    Example:
        >>> in_turn(3, lambda number: number**2)
        [0, 1, 4]
    """
    return [piece(number) for number in range(count)]


def in_forks(count: int, piece: Callable[[int], T]) -> list[T]:
    """Return all pieces; a `Divide` of one process per processor.

    Each process takes the next piece when it has finished one. If a fork fails or hangs, this
    process does its pieces. If this process cannot be forked, it does all pieces.

    Args:
        count: at most 255 of the pieces are shared.
        piece: returns a piece by its number, as data that can be pickled.
    """
    if sys.platform != "linux" or not _can_fork():
        return in_turn(count, piece)
    processes = min(len(os.sched_getaffinity(0)), count, _MOST_PROCESSES)
    numbers, end = os.pipe()
    os.write(end, bytes(range(min(count, _MOST_PIECES))))
    os.close(end)

    def taken() -> Iterator[int]:
        while number := os.read(numbers, 1):
            yield number[0]

    def work(results: Connection) -> None:
        torch.set_num_threads(1)  # threads of OpenMP do not exist in a fork
        results.send({number: piece(number) for number in taken()})

    context = multiprocessing.get_context("fork")
    forks, pending = [], []
    try:
        for _ in range(processes - 1):
            receiving, sending = context.Pipe(duplex=False)
            fork = context.Process(target=work, args=(sending,), daemon=True)
            fork.start()
            sending.close()  # so that the end of the fork is noticed
            forks.append(fork)
            pending.append(receiving)
        done = {number: piece(number) for number in taken()}
        while pending and len(done) < count:
            results = pending.pop()
            if results.poll(_LONGEST_WAIT):
                with suppress(EOFError):  # the fork has failed
                    done |= results.recv()
        return [done[number] if number in done else piece(number) for number in range(count)]
    finally:
        os.close(numbers)
        for fork in forks:
            fork.kill()
            fork.join()


def _can_fork() -> bool:
    """Whether a fork of this process can work.

    A fork would wait for the locks of other threads, also of those that torch starts for the GPU.
    Autograd has such threads in a build for CUDA after a step on fake tensors, with or without a
    GPU, and refuses to run in a fork. Only a fork can tell.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    if torch.accelerator.is_available():
        return False
    trial = multiprocessing.get_context("fork").Process(target=_run_autograd, daemon=True)
    trial.start()
    trial.join()
    return trial.exitcode == 0


def _run_autograd() -> None:
    try:
        torch.ones(1, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        sys.exit(1)
