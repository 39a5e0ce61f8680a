"""Seeds, under the names and the variable that Lightning has for them."""

from __future__ import annotations

import hashlib
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

SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"

# By the name whose level scripts raise, so that nothing is said.
_log = logging.getLogger("lightning.fabric.utilities.seed")
if not logging.getLogger("lightning.fabric").level:
    logging.getLogger("lightning.fabric").setLevel(logging.INFO)


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch; return the seed.

    Args:
        seed: None: what PL_GLOBAL_SEED says, or what STRATAGEM_SEED says, or 0.
        workers: seed the workers of data loaders too, each rank's differently.
        verbose: log the seed on rank 0, to stderr where the program has set up no logging, and
            warn where none was given.

    Raises:
        ConfigurationError: the seed is out of range, or the variable holds none.
    """
    if seed is None and (text := os.environ.get(SEED_VARIABLE)):
        if not text.isdigit():
            raise ConfigurationError(f"expected a number in {SEED_VARIABLE}, received {text!r}")
        seed = int(text)
    if seed is None and verbose and rng.SEED_VARIABLE not in os.environ:
        rank_zero_warn(
            f"seed_everything() received no seed and takes 0: pass one, or set {SEED_VARIABLE}"
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
    # Also where this is called in one process for several workers: torch's seed is the same then.
    mixed = hashlib.blake2b(f"{torch.initial_seed()} {worker_id} {rank}".encode()).digest()
    of_python, of_torch, of_numpy = (int.from_bytes(mixed[at : at + 4], "big") for at in (0, 4, 8))
    random.seed(of_python)
    torch.manual_seed(of_torch)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(of_numpy)
