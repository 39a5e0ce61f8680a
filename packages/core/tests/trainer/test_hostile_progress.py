"""A Trainer's checkpoint with an entry of another kind: refused, or nothing depends on the entry.

Every place in what a checkpoint has beside weights and optimizers gets every value of VALUES. Some
of them, drawn with a fixed seed, run with all tests; `STRATAGEM_FUZZ_CASES` in the environment
(the session `fuzz`) is the number of cases to draw.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stratagem import Lite, Module, Trainer
from stratagem.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import CheckpointError, StratagemError

CASES = int(os.environ.get("STRATAGEM_FUZZ_CASES", "250"))
MISSING = object()
VALUES: dict[str, Any] = {
    "a text": "x",
    "a negative number": -1,
    "zero": 0,
    "None": None,
    "a fraction": 2.5,
    "an empty list": [],
    "an empty dict": {},
    "a tensor": torch.zeros(3),
    "bytes": torch.zeros(7, dtype=torch.uint8),
    "nothing": MISSING,
    "a huge number": 2**70,
    "a nested list": [[1]],
    "a nested dict": {"a": {"b": 1}},
}
Place = tuple[Any, ...]


class Samples(Dataset[torch.Tensor]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.numbers = random.Random(3)
        self.x = torch.randn(12, 3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        sample: torch.Tensor = self.x[index] + self.numbers.random()
        return sample


class Mean(nn.Module):
    """A metric with the attributes by which torchmetrics' are known."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "values": []}
        self._reductions: dict[str, Any] = {"total": None, "values": None}
        self._update_count = 0
        self._computed: Any = None
        self.device = torch.device("cpu")
        self.total, self.values = torch.zeros(()), [torch.zeros(1)]

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value

    def compute(self) -> torch.Tensor:
        computed: torch.Tensor = self.total + torch.cat(self.values).sum()
        return computed


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.generator = torch.Generator()
        self.mean = Mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.rand(1, generator=self.generator)
        loss: torch.Tensor = (self.net(batch) + noise).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("most", loss, reduce_fx=lambda v: v.max(), on_epoch=True, on_step=False)
        self.log("least", loss, reduce_fx="min", on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {"scheduler": plateau, "monitor": "loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(Samples(), 2, shuffle=True, generator=generator), DataLoader(Samples(), 4)


def trainer(folder: Path, steps: int) -> Trainer:
    callbacks = [
        EarlyStopping("val", patience=9),
        ModelCheckpoint(monitor="val", save_top_k=2, save_last=True),
        Timer(),
    ]
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        callbacks=callbacks,
    )


def places(value: Any, of: Place = ()) -> Iterator[Place]:
    """Yield the place of each entry; of a list, of the first five."""
    named = value.items() if isinstance(value, dict) else enumerate(value[:5])
    for key, inner in named:
        yield (*of, key)
        if isinstance(inner, (dict, list, tuple)):
            yield from places(inner, (*of, key))


def with_value(data: Any, place: Place, value: Any) -> Any:
    """Return a copy of `data` with another value at a place."""
    key, *rest = place
    copied = dict(data) if isinstance(data, dict) else list(data)
    if rest:
        copied[key] = with_value(data[key], tuple(rest), value)
    elif value is MISSING:
        del copied[key]
    else:
        copied[key] = value
    return copied


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("steps", [8, 12], ids=["within an epoch", "at its end"])
def test_an_entry_of_another_kind_ends_in_an_error_of_ours_or_in_training(
    tmp_path: Path, steps: int
) -> None:
    storage, changed = SingleFileCheckpointIO(), tmp_path / "changed.ckpt"
    first = trainer(tmp_path, steps)
    first.fit(Net(), *loaders())
    saved = storage.load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    others = {k: v for k, v in saved.items() if k not in ("state_dict", "optimizer_states")}
    cases = [(place, value) for place in places(others) for value in VALUES]
    refused = 0
    drawn = random.Random(steps).sample(cases, min(CASES // 2, len(cases)))
    for place, value in drawn:
        storage.save_checkpoint(with_value(saved, place, VALUES[value]), changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer(tmp_path, 15).fit(Net(), *loaders(), ckpt_path=changed)
        except StratagemError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{value} at {place}: {type(error).__name__}: {error}")
    assert refused > len(drawn) // 2, "few of the changed entries were looked at"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("ranks", 0, "random", "torch"), torch.zeros(7), "cannot load its state"),
        (("ranks", 0, "loader", "shards"), 0, "'shards'] is 0, expected a number from 1 on"),
        (("ranks", 0, "epoch", "validated"), "x", "'validated'] is 'x', expected a number from 0"),
        (("ranks", 0, "epoch", "split"), [0], r"'split'] has 1 items, expected 2"),
        (("ranks", 0, "epoch", "latest"), {}, "'latest'] lacks values, evaluation_steps"),
        (("ranks", 0, "epoch", "latest", "bar"), {3: 1}, "'bar'] has the key 3, expected a str"),
        (("ranks", 0, "epoch", "logged", "least", "options", 4), "x", "reduced by 'x', which is"),
        (("ranks", 0, "epoch", "metrics", "mean", "state", "total"), 1, "total'] is 1, expected a"),
        (("ranks", 0, "epoch", "metrics", "mean", "state", "compute"), 1, "no such 'compute'"),
        (("progress", "stop_delayed"), "x", "progress['stop_delayed'] is 'x', expected a bool"),
        (
            ("callbacks", "EarlyStopping(val, min)", "wait_count"),
            "x",
            "EarlyStopping's 'wait_count'",
        ),
    ],
)
def test_the_error_names_the_entry(tmp_path: Path, place: Place, value: Any, said: str) -> None:
    storage, changed = SingleFileCheckpointIO(), tmp_path / "changed.ckpt"
    trainer(tmp_path, 8).fit(Net(), *loaders())
    saved = storage.load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    storage.save_checkpoint(with_value(saved, place, value), changed)
    with pytest.raises(CheckpointError) as caught:
        trainer(tmp_path, 15).fit(Net(), *loaders(), ckpt_path=changed)
    assert said in str(caught.value)
    assert str(changed) in str(caught.value)


class Verdict(Callback):
    """Its state has another kind after training than before."""

    def __init__(self) -> None:
        self.verdict: int | str = 0

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self.verdict = "good"

    def state_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.verdict = state["verdict"]


def test_the_state_of_a_strangers_callback_may_change_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verdict, "__module__", "stratagem_strangers.verdict")
    first, second = trainer(tmp_path, 8), trainer(tmp_path, 8)
    verdict = Verdict()
    first.callbacks.append(Verdict())
    second.callbacks.append(verdict)
    first.fit(Net(), *loaders())
    first.save_checkpoint(tmp_path / "ended.ckpt")
    second.fit(Net(), *loaders(), ckpt_path=tmp_path / "ended.ckpt")
    assert verdict.state_dict() == {"verdict": "good"}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("loader", 0, "batches"), -1, "['batches'] is -1, expected a number from 0 on"),
        (("loader", 0, "random", "python"), "x", "a loader cannot load its state"),
        (("loader", 0, "loader", "batch_size"), 0, "batch_size'] is 0, expected a number from 1"),
    ],
)
def test_a_loader_of_lite_is_compared_too(
    tmp_path: Path, place: Place, value: Any, said: str
) -> None:
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    loader = lite.setup_dataloaders(DataLoader(Samples(), 2))
    next(iter(loader))
    lite.save(tmp_path / "saved.ckpt", {"loader": loader})
    saved = SingleFileCheckpointIO().load_checkpoint(tmp_path / "saved.ckpt")
    SingleFileCheckpointIO().save_checkpoint(
        with_value(saved, place, value), tmp_path / "changed.ckpt"
    )
    with pytest.raises(CheckpointError, match=r"changed\.ckpt") as caught:
        lite.load(tmp_path / "changed.ckpt", {"loader": loader})
    assert said in str(caught.value)
