"""Shards: the chunks of a tensor that a rank holds."""

import random

import pytest
import torch

from stratagem.checkpoint import Shards


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 1, 3), (2, 3, 4), (2, 2, 3, 2)])
def test_boxes_of_a_flat_range_cover_exactly_the_range(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for _ in range(50):
        start, end = sorted(random.choices(range(whole.numel() + 1), k=2))
        shards = Shards.of_flat(shape, whole.flatten()[start:end], start=start)
        rebuilt = torch.full(shape, -1)
        for offsets, chunk in shards.chunks:
            region = tuple(slice(o, o + n) for o, n in zip(offsets, chunk.shape, strict=True))
            assert (rebuilt[region] == -1).all()
            rebuilt[region] = chunk
        held = (rebuilt.flatten() >= 0).nonzero().flatten().tolist()
        assert held == list(range(start, end))
        assert torch.equal(rebuilt.flatten()[start:end], whole.flatten()[start:end])


def test_the_boxes_alias_the_flat_tensor() -> None:
    flat = torch.zeros(6)
    shards = Shards.of_flat((3, 2), flat, start=0)
    shards.chunks[0][1].fill_(1)
    assert flat.tolist() == [1] * 6
