"""seed_everything: one seed for every source of random numbers."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch

from stratagem.errors import ConfigurationError

SEED_VARIABLE = "STRATAGEM_SEED"
WORKERS_VARIABLE = "STRATAGEM_SEED_WORKERS"


def seed_everything(
    seed: int | None = None, *, workers: bool = False, verbose: bool = False
) -> int:
    """Seed Python, NumPy and torch (all devices) alike on every rank; return the seed.

    Args:
        seed: from 0 to 2**32 - 1; None takes STRATAGEM_SEED, or 0 if that is not set.
        workers: also give the workers of data loaders seeds that differ by rank, so that random
            augmentation differs between ranks.
        verbose: print the seed.

    Raises:
        ConfigurationError: the seed is out of range.

    Example:
        >>> from stratagem import seed_everything
        >>> seed_everything(42)
        42
    """
    if seed is None:
        text = os.environ.get(SEED_VARIABLE, "0")
        if not text.isdigit():
            raise ConfigurationError(f"expected a number in {SEED_VARIABLE}, received {text!r}")
        seed = int(text)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed!r}: expected a whole number from 0 to 2**32 - 1")
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if verbose:
        print(f"seed set to {seed}")
    return seed


def chosen_seed() -> int:
    """Return the seed that `seed_everything` set, or 0."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def seeds_workers() -> bool:
    """Whether `seed_everything(workers=True)` was called."""
    return os.environ.get(WORKERS_VARIABLE) == "1"


class WorkerSeed:
    """A `worker_init_fn` that makes a worker's seeds differ by rank, then calls the user's.

    torch seeds each worker from one number that all ranks share after `seed_everything`.
    """

    def __init__(self, rank: int, then: Any = None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Seed this worker."""
        seed = (torch.initial_seed() + self.rank * 1_000_003) % 2**32
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if self.then is not None:
            self.then(worker_id)
