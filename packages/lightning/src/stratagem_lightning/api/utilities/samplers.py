"""Samplers of ranks, by Lightning's names."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch import distributed
from torch.utils.data import Dataset, DistributedSampler, Sampler


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Divides samples between ranks without repetition: some ranks may have one sample more.

    Args:
        dataset: a dataset with a length.
        *args, **kwargs: the arguments of `torch.utils.data.DistributedSampler`.

    Example:
        >>> from stratagem_lightning.api.utilities.samplers import UnrepeatedDistributedSampler
        >>> one = UnrepeatedDistributedSampler(range(5), rank=0, num_replicas=2, shuffle=False)
        >>> other = UnrepeatedDistributedSampler(range(5), rank=1, num_replicas=2, shuffle=False)
        >>> list(one), list(other)
        ([0, 2, 4], [1, 3])
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.total_size = len(dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))


class _OfAnother(DistributedSampler[Any]):
    """Divides what another sampler yields."""

    def __init__(self, sampler: Sampler[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_Positions(sampler), *args, **kwargs)
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        yielded = list(self._sampler)
        return (yielded[position] for position in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Let this sampler, and the other one where it has epochs, shuffle for an epoch."""
        super().set_epoch(epoch)
        of_other = getattr(self._sampler, "set_epoch", None)
        if callable(of_other):
            of_other(epoch)


class DistributedSamplerWrapper(_OfAnother):
    """Divides another sampler's indices between ranks.

    Args:
        sampler: a sampler with a length that yields the same indices on every rank.
        *args, **kwargs: the arguments of `torch.utils.data.DistributedSampler`.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> from stratagem_lightning.api.utilities.samplers import DistributedSamplerWrapper
        >>> sampler = SequentialSampler("abcd")
        >>> list(DistributedSamplerWrapper(sampler, num_replicas=2, rank=1, shuffle=False))
        [1, 3]
    """


class UnrepeatedDistributedSamplerWrapper(_OfAnother, UnrepeatedDistributedSampler):
    """Divides another sampler's indices between ranks without repetition.

    Args:
        sampler: a sampler with a length that yields the same indices on every rank.
        *args, **kwargs: the arguments of `torch.utils.data.DistributedSampler`.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> from stratagem_lightning.api.utilities.samplers import (
        ...     UnrepeatedDistributedSamplerWrapper as Wrapper,
        ... )
        >>> sampler = SequentialSampler("abc")
        >>> [list(Wrapper(sampler, num_replicas=2, rank=r, shuffle=False)) for r in range(2)]
        [[0, 2], [1]]
    """


class _Positions(Dataset[int]):
    """As long as a sampler."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        assert isinstance(self._sampler, Sized)
        return len(self._sampler)

    def __getitem__(self, position: int) -> int:
        return position


def distributed_is_initialized() -> bool:
    """Whether this process has a process group.

    Example:
        >>> distributed_is_initialized()
        False
    """
    return distributed.is_available() and distributed.is_initialized()
