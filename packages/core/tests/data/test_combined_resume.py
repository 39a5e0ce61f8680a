"""CombinedLoader resumes at any batch: each loader goes on where it was, and no sample is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from stratagem import Lite
from stratagem.data import CombinedLoader
from stratagem.data.combined_loader import MODES
from stratagem.data.resume.combined import CombinedResumable
from stratagem.errors import CheckpointMismatchError

Make = Callable[[], list[Any]]


class Stream(IterableDataset[int]):
    """A stream without length and state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000, 1000 + self.count))


def shuffled(count: int, batch_size: int, first: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(count)
    data: Any = range(first, first + count)
    return DataLoader(data, batch_size, shuffle=True, generator=generator)


def in_order(data: Any) -> DataLoader[Any]:
    return DataLoader(data, 2)


def stream(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(count), batch_size)


LOADERS: dict[str, Make] = {
    "lengths": lambda: [shuffled(12, 2), shuffled(14, 2), shuffled(4, 2)],
    "stream first": lambda: [stream(12, 4), shuffled(12, 4)],
    "stream last": lambda: [shuffled(12, 4), stream(12, 4)],
    "stream between": lambda: [shuffled(6, 2), stream(5, 2), shuffled(10, 3)],
    "long stream": lambda: [shuffled(6, 2), stream(20, 2)],
    "empty": lambda: [shuffled(6, 2), in_order([]), shuffled(4, 2)],
}


def resumable(loaders: list[Any], mode: Any) -> CombinedResumable:
    return CombinedResumable(CombinedLoader(loaders, mode), "the loader", 0, (0, 1))


def plain(batch: Any) -> Any:
    if isinstance(batch, list):
        return [plain(each) for each in batch]
    return batch if batch is None else batch.tolist()


@pytest.mark.filterwarnings("ignore:a run that resumes:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", LOADERS)
def test_each_batch_of_an_epoch_can_be_the_next_one(which: str, mode: str) -> None:
    make = LOADERS[which]
    whole = resumable(make(), mode)
    epochs = [[plain(batch) for batch in whole.begin(epoch, 0)[0]] for epoch in (0, 1)]
    for done in range(1, len(epochs[0]) + 1):
        first = resumable(make(), mode)
        batches, _ = first.begin(0, 0)
        for _ in range(done):
            next(batches)
        again = resumable(make(), mode)
        assert again.resume([first.state()], done) == done
        rest = [[plain(batch) for batch in again.begin(*at)[0]] for at in ((0, done), (1, 0))]
        assert rest == [epochs[0][done:], epochs[1]], done


def samples_of(batch: Any) -> list[int]:
    parts = batch if isinstance(batch, list) else [batch]
    return [sample for part in parts if part is not None for sample in part.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [(12, 12), (25, 25), (24, 48), (10, 30)])
@pytest.mark.parametrize(
    "sizes", [((4, 4), (3, 3)), ((8, 8), (5, 5)), ((4, 4), (8, 8)), ((4, 4), (4, 8))]
)
def test_other_batch_sizes_read_each_sample_once(
    mode: str, counts: tuple[int, int], sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    def made(sizes: tuple[int, int]) -> CombinedResumable:
        loaders = [shuffled(counts[0], sizes[0]), shuffled(counts[1], sizes[1], first=100)]
        return resumable(loaders, mode)

    everything = {*range(counts[0]), *range(100, 100 + counts[1])}
    for done in range(1, len(list(made(sizes[0]).begin(0, 0)[0]))):
        first = made(sizes[0])
        batches, _ = first.begin(0, 0)
        seen = Counter(sample for _ in range(done) for sample in samples_of(next(batches)))
        again = made(sizes[1])
        position = again.resume([first.state()], done)
        batches, _ = again.begin(0, position)
        left, rest = again.batches_left(position), [samples_of(batch) for batch in batches]
        assert left == len(rest)
        seen.update(sample for batch in rest for sample in batch)
        if mode != "max_size_cycle":  # which repeats the shorter loader
            assert max(seen.values()) == 1
        if mode != "min_size":  # which ends before the longer one
            assert set(seen) == everything


def test_a_checkpoint_without_positions_resumes_by_the_lengths() -> None:
    for mode in MODES:
        make = LOADERS["lengths"]
        whole = [plain(batch) for batch in resumable(make(), mode).begin(0, 0)[0]]
        for done in range(1, len(whole)):
            first = resumable(make(), mode)
            batches, _ = first.begin(0, 0)
            for _ in range(done):
                next(batches)
            state = first.state()
            del state["readings"]
            again = resumable(make(), mode)
            batches, _ = again.begin(0, again.resume([state], done))
            assert [plain(batch) for batch in batches] == whole[done:], (mode, done)


def test_positions_of_another_form_are_refused() -> None:
    loader = resumable(LOADERS["lengths"](), "min_size")
    state = {**loader.state(within_epoch=False), "readings": [{"starts": "0", "ends": []}]}
    with pytest.raises(CheckpointMismatchError, match=r"position in the loader\['readings'\]"):
        loader.resume([state], 1)


@pytest.mark.parametrize("mode", MODES)
def test_lite_resumes_a_combined_loader(mode: Any) -> None:
    def made() -> Any:
        lite = Lite(accelerator="cpu", devices=1)
        return lite.setup_dataloaders(CombinedLoader(LOADERS["lengths"](), mode))

    whole = [plain(batch) for batch, _, _ in made()]
    for done in range(1, len(whole)):
        loader = made()
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        again = made()
        again.load_state_dict(loader.state_dict())
        assert [plain(batch) for batch, _, _ in again] == whole[done:]
