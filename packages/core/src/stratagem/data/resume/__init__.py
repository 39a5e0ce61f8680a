"""Resume a data loader in the middle of an epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.resume.indexed import IndexedLoader
from stratagem.data.resume.resumable import Resumable, SkippingLoader, StatefulLoader, has_state


def make_resumable(
    loader: Any, name: str, rank: int = 0, shard: tuple[int, int] = (0, 1)
) -> Resumable:
    """Return an object that iterates over a loader from any batch of an epoch on.

    A DataLoader with a map-style dataset skips indices. This includes a StatefulDataLoader, whose
    own state does not have the RNG states in workers. Another loader resumes from its own state,
    or else reads the earlier batches again.

    Args:
        loader, name, rank, shard: as for `Resumable`.
    """
    is_torchs = isinstance(loader, DataLoader)
    if is_torchs and not isinstance(loader.dataset, IterableDataset):
        return IndexedLoader(loader, name, rank, shard)
    if has_state(loader):
        return StatefulLoader(loader, name, rank, shard, loader)
    if is_torchs and loader.num_workers == 0 and has_state(loader.dataset):
        return StatefulLoader(loader, name, rank, shard, loader.dataset)
    return SkippingLoader(loader, name, rank, shard)
