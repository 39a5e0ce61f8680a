"""Seeds, under the names and the variable that Lightning has for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stratagem import rng
from stratagem.errors import ConfigurationError
from stratagem.launch.rank_zero import rank_zero_only

SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch; return the seed.

    Args:
        seed: None: what PL_GLOBAL_SEED says, or what STRATAGEM_SEED says, or 0.
        workers: seed the workers of data loaders too, each rank's differently.
        verbose: print the seed.

    Raises:
        ConfigurationError: the seed is out of range, or the variable holds none.
    """
    if seed is None and (text := os.environ.get(SEED_VARIABLE)):
        if not text.isdigit():
            raise ConfigurationError(f"expected a number in {SEED_VARIABLE}, received {text!r}")
        seed = int(text)
    seed = rng.seed_everything(seed, workers=workers, verbose=verbose)
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    return seed


def reset_seed() -> None:
    """Seed everything again as `seed_everything` did before; nothing if it was not called."""
    if os.environ.get(SEED_VARIABLE):
        workers = os.environ.get(WORKERS_VARIABLE) == "1"
        seed_everything(None, workers=workers, verbose=False)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Give the random number generators their states back after the block.

    Args:
        include_cuda: of the GPUs too.
    """
    devices = torch.cuda.get_rng_state_all() if include_cuda and torch.cuda.is_available() else []
    with rng.preserve_rng_state():
        try:
            yield
        finally:
            if devices:
                torch.cuda.set_rng_state_all(devices)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a data loader's worker by its rank, its number and the seed of its loader.

    Args:
        worker_id: its number.
        rank: of the process that reads; None: this one.
    """
    rng.WorkerSeed(rank_zero_only.rank if rank is None else rank)(worker_id)
