"""Seeds, under the names and the variable that Lightning has for them."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stratagem import rng
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_only, rank_zero_warn
from stratagem_lightning.api.utilities.phrases import in_lightnings_words

SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"

# Scripts raise the level of this logger by name, to silence the message.
_log = logging.getLogger("lightning.fabric.utilities.seed")
if not logging.getLogger("lightning.fabric").level:
    logging.getLogger("lightning.fabric").setLevel(logging.INFO)


@in_lightnings_words
def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch; return the seed.

    Args:
        seed: the seed; None for the value of PL_GLOBAL_SEED, or of STRATAGEM_SEED, or 0.
        workers: seed the workers of data loaders too, with another seed on each rank.
        verbose: log the seed on rank 0, to stderr if the program has not set up logging, and warn
            if no seed is given.

    Raises:
        ConfigurationError: the seed is out of range, or the variable is not a number.
    """
    if seed is None and (text := os.environ.get(SEED_VARIABLE)):
        if not text.isdigit():
            raise ConfigurationError(
                f"Invalid seed specified: expected a number in {SEED_VARIABLE}, received {text!r}"
            )
        seed = int(text)
    if seed is None and verbose and rng.SEED_VARIABLE not in os.environ:
        rank_zero_warn(
            f"No seed found: seed_everything() takes 0. Pass a seed, or set {SEED_VARIABLE}"
        )
    seed = rng.seed_everything(seed, workers=workers)
    if verbose and _log.isEnabledFor(logging.INFO):
        _say(seed)
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    return seed


@rank_zero_only
def _say(seed: int) -> None:
    if _log.hasHandlers():
        _log.info("seed set to %s", seed)
    else:
        print(f"seed set to {seed}", file=sys.stderr)


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
    rank = rank_zero_only.rank if rank is None else rank
    # All workers of a loader share this number; the sequences equal Lightning's.
    base = torch.initial_seed() - worker_id
    of_torch, high, low = _sequence(base, worker_id, rank)
    torch.manual_seed(of_torch)
    random.seed(high << 32 | low)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed(numpy.random.SeedSequence([base, worker_id, rank]).generate_state(4))


def _sequence(base: int, worker_id: int, rank: int) -> list[int]:
    """Return three seeds of 64 bits: MurmurHash3's finalizer, then steps of Knuth's generator."""
    seed = base << 32 | worker_id << 16 | rank
    seed ^= seed >> 33
    seed = seed * 0xFF51AFD7ED558CCD % 2**64
    seed ^= seed >> 33
    seed = seed * 0xC4CEB9FE1A85EC53 % 2**64
    seed ^= seed >> 33
    seeds = []
    for _ in range(3):
        seed = (seed * 6364136223846793005 + 1) % 2**64
        seeds.append(seed)
    return seeds
