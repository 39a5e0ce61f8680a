"""A hand-written loop that was interrupted goes on bit for bit, in the middle of an epoch too."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem import Lite

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((4,), index / 24) + 0.1 * noise


class Stateful(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        while self.position < 24:
            self.position += 1
            yield torch.full((4,), self.position / 24) + 0.1 * torch.rand(())

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


def shuffled(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, **arguments)


def train(loaders: Callable[[], list[Any]], folder: Path, path: Path | None, seed: int) -> Any:
    """Return the losses of 3 epochs over zipped loaders; saves after each step and each epoch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    data = [lite.setup_dataloaders(loader) for loader in loaders()]
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    state.update({f"data{number}": loader for number, loader in enumerate(data)})
    if path is not None:
        lite.load(path, state)
    losses: list[str] = []
    for epoch in range(state["epoch"], 3):
        for step, batches in enumerate(zip(*data, strict=True)):
            optimizer.zero_grad()
            loss = (model(torch.cat(batches)) - 1).square().mean()
            lite.backward(loss)
            optimizer.step()
            losses.append(loss.item().hex())
            if path is None:
                lite.save(folder / f"{epoch}-{step}.ckpt", {**state, "epoch": epoch})
        if path is None:
            lite.save(folder / f"{epoch}-end.ckpt", {**state, "epoch": epoch + 1})
    return losses


LOADERS: dict[str, Callable[[], list[Any]]] = {
    "shuffled": lambda: [shuffled()],
    "two workers": lambda: [shuffled(num_workers=2)],
    "persistent workers": lambda: [shuffled(num_workers=1, persistent_workers=True)],
    "two loaders": lambda: [shuffled(), shuffled(drop_last=True)],
    "short last batch, with a generator": lambda: [
        DataLoader(
            Augmented(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
    ],
    "dataset with a state": lambda: [DataLoader(Stateful(), batch_size=4)],
    "list": lambda: [[torch.full((2, 4), float(number)) for number in range(6)]],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loop_goes_on_with_the_losses_of_the_one_that_was_not_interrupted(
    kind: str, tmp_path: Path
) -> None:
    whole = train(LOADERS[kind], tmp_path, None, seed=1)
    of = len(whole) // 3
    assert of in (5, 6)
    for name, stopped in (("0-1", 2), (f"0-{of - 1}", of), ("0-end", of), ("2-2", 2 * of + 3)):
        rest = train(LOADERS[kind], tmp_path, tmp_path / f"{name}.ckpt", seed=99)
        assert rest == whole[stopped:], f"resumed from {name}"


def test_an_epoch_that_the_user_sets_goes_on(tmp_path: Path) -> None:
    def read(path: Path | None) -> list[int]:
        lite = Lite(accelerator="cpu", devices=1)
        lite.launch()
        data: Any = range(12)
        sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
        loader = lite.setup_dataloaders(DataLoader(data, batch_size=2, sampler=sampler))
        state = {"loader": loader, "epoch": 0}
        if path is not None:
            lite.load(path, state)
        found: list[int] = []
        for epoch in range(state["epoch"], 3):
            sampler.set_epoch(2 * epoch)
            for batch in loader:
                found += batch.tolist()
                if path is None and epoch == 1 and len(found) == 16:
                    lite.save(tmp_path / "within.ckpt", {**state, "epoch": epoch})
        return found

    whole = read(None)
    assert read(tmp_path / "within.ckpt") == whole[16:]


def test_lite_loop_resumes_after_a_break(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    loader = lite.setup_dataloaders(DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]
    for _ in loader:
        break
    place = loader.state_dict()
    # In this process the next loop is another epoch, as with any DataLoader.
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.load_state_dict(place)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_skipped_iterable_batches_warn_once(tmp_path: Path) -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()

    def loader() -> Any:
        return lite.setup_dataloaders(DataLoader(Numbers(), batch_size=1))

    saving, again = loader(), loader()

    def save() -> None:
        for batch in saving:
            if batch.item() in (2, 4):
                lite.save(tmp_path / f"{batch.item()}.ckpt", {"data": saving})

    with pytest.warns(UserWarning, match="the dataset of the data loader is an IterableDataset"):
        save()
    for number in (2, 4):
        lite.load(tmp_path / f"{number}.ckpt", {"data": again})
        for batch in again:
            number += 1
            assert batch.item() == number
            if number == 4:
                with pytest.warns(UserWarning, match="may differ"):
                    assert again.state_dict()["batches"] == 5
        assert number == 7


SCRIPT = (SCRIPTS / "lite_resume.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_of_a_loop_goes_on_with_its_own_random_numbers(
    strategy: str, run_script: RunScript, tmp_path: Path
) -> None:
    run_script(SCRIPT, strategy)
    ranks = []
    for rank in range(2):
        whole, rest = json.loads((tmp_path / f"{strategy}{rank}.json").read_text())
        assert len(whole) == 12
        assert rest == whole[6 + 3 :]
        ranks.append(whole)
    assert ranks[0] != ranks[1]

    # One process goes on with what was left of the epoch, and takes the next one.
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    samples: Any = range(48)
    data = lite.setup_dataloaders(DataLoader(samples, batch_size=4, shuffle=True))
    # Its dataset is of another type, which holds the numbers of the samples.
    with pytest.warns(UserWarning, match="dataset of the data loader was a 'Augmented', and now"):
        lite.load(tmp_path / "within.ckpt", {"data": data}, strict=False)
    rest_of_epoch = [sample for batch in data for sample in batch.tolist()]
    assert len(set(rest_of_epoch)) == len(rest_of_epoch) == 48 - 3 * 8
    assert sorted(sample for batch in data for sample in batch.tolist()) == list(range(48))
