"""Steps that read their batches themselves, by `dataloader_iter`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from stratagem import Module
from stratagem.callbacks import StochasticWeightAveraging
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.trainer import TrainLoader
from stratagem_lightning.api.core import dataloader_iter
from stratagem_lightning.api.trainer import Trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)
"""What is advised against here is what the tests are of, or does not matter to them."""


class Pairs(Module):
    """Reads two batches in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        with torch.no_grad():
            self.layer[0].weight.fill_(0.5)  # type: ignore[operator]
        self.seen: list[Any] = []

    def pair(self, batches: Iterator[Any], what: str) -> Tensor:
        read = [next(batches), next(batches)]
        self.seen.append((what, *((batch_idx, loader_idx) for _, batch_idx, loader_idx in read)))
        loss: Tensor = self.layer(torch.cat([batch for batch, _, _ in read])).square().sum()
        return loss

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        loss = self.pair(dataloader_iter, "train")
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        self.log("value", self.pair(dataloader_iter, "validation"))

    def predict_step(self, dataloader_iter: Iterator[Any]) -> int:  # type: ignore[override]
        return len(self.pair(dataloader_iter, "predict").shape)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", None if batch is None else batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx, batch.shape[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset[Tensor]):
    """Batches whose number nobody knows before."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(10.0).reshape(5, 2, 1))


def numbers(batches: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(2.0 * batches).unsqueeze(1), batch_size=2)  # type: ignore[arg-type]


def quiet(*callbacks: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "logger": False, **options}
    return Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **options,
    )


def test_dataloader_iter_steps_read_several_batches() -> None:
    model = Pairs()
    trainer = quiet(limit_train_batches=6, val_check_interval=4, limit_val_batches=2)
    trainer.fit(model, numbers(8), numbers(8))
    assert model.seen == [
        ("start", None),
        ("train", (0, 0), (1, 0)),
        ("end", 1, 2),
        ("start", 1),
        ("train", (2, 0), (3, 0)),
        ("end", 3, 2),
        ("validation", (0, 0), (1, 0)),
        ("start", 3),
        ("train", (4, 0), (5, 0)),
        ("end", 5, 2),
    ]
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    assert {"loss", "value"} <= trainer.callback_metrics.keys()
    model.seen.clear()
    assert trainer.predict(model, [numbers(2), numbers(3)]) == [[0], [0]]
    assert model.seen == [("predict", (0, 0), (1, 0)), ("predict", (0, 1), (1, 1))]


def test_an_epoch_ends_where_a_step_finds_no_batch() -> None:
    model = Pairs()
    trainer = quiet(max_epochs=2)
    trainer.fit(model, DataLoader(Stream(), batch_size=None), numbers(4))
    trained = [("train", (0, 0), (1, 0)), ("train", (2, 0), (3, 0))]
    validated = [("validation", (0, 0), (1, 0)), ("validation", (2, 0), (3, 0))]
    steps = [one for one in model.seen if one[0] in ("train", "validation")]
    assert steps == [*trained, *validated] * 2
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)

    with pytest.raises(UserCodeError, match="the training data loader yielded no batch; expected"):
        quiet(limit_val_batches=0).fit(Pairs(), iter(()))


def test_a_run_goes_on_behind_the_batches_that_were_read(tmp_path: Path) -> None:
    class Stops(Pairs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3 and self.stops:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

        stops = True

    whole, half = Stops(), Stops()
    quiet(limit_val_batches=0).fit(whole, numbers(8))
    half.stops = False
    quiet(limit_val_batches=0).fit(half, numbers(8), ckpt_path=tmp_path / "middle.ckpt")
    assert [one for one in half.seen if one[0] == "train"] == [
        ("train", (4, 0), (5, 0)),
        ("train", (6, 0), (7, 0)),
    ]
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_takes_no_batch_is_an_error() -> None:
    class TakesNone(Pairs):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            return self.layer(torch.ones(2, 1)).square().sum()  # type: ignore[no-any-return]

        def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
            """Nothing."""

    for run in (quiet(limit_val_batches=0).fit, quiet().validate):
        with pytest.raises(UserCodeError, match="took no batch from dataloader_iter, so that it"):
            run(TakesNone(), numbers(4))


def test_by_hand_a_step_may_keep_a_batch_for_the_next() -> None:
    class Ahead(Pairs):
        automatic_optimization = False
        kept: Any = None

        def training_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
            batch = next(dataloader_iter)[0] if self.kept is None else self.kept
            self.kept = next(dataloader_iter, (None,))[0]
            self.manual_backward(self.layer(batch).square().sum())
            self.optimizers().step()

    model = Ahead()
    trainer = quiet(limit_val_batches=0)
    trainer.fit(model, DataLoader(Stream(), batch_size=None))
    assert (trainer.global_step, model.kept) == (5, None)


def test_statistics_of_batch_norm_are_taken_by_the_step_that_reads() -> None:
    model = Pairs()
    quiet(StochasticWeightAveraging(0.01, 1), limit_val_batches=0).fit(model, numbers(5))
    assert [one[0] for one in model.seen if one[0] == "train"] == ["train"] * 4  # two of them again
    assert int(model.layer[1].num_batches_tracked) == 2  # type: ignore[arg-type]


class Overrides(Pairs):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class Searches(Pairs):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (Pairs, {"accumulate_grad_batches": 2}, "accumulate_grad_batches counts batches that"),
        (Overrides, {}, "it overrides optimizer_step: leave that out, let training_step take b"),
        (Searches, {}, "its optimizer computes the loss several times in a step: leave"),
    ],
)
def test_dataloader_iter_refuses_options_that_need_batches_early(
    kind: type[Pairs], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"training_step takes dataloader_iter, .*{why}"):
        quiet(limit_val_batches=0, **options).fit(kind(), numbers(4))


def test_strategies_and_ranks_that_take_batches_first_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataloader_iter, "takes_own_steps", lambda strategy: True)
    with pytest.raises(ConfigurationError, match="the strategy 'single_device' takes the step as"):
        quiet(limit_val_batches=0).fit(Pairs(), numbers(4))
    monkeypatch.setattr(TrainLoader, "compares_ranks", True)
    with pytest.raises(ConfigurationError, match="ranks that may have different numbers of batch"):
        quiet(limit_val_batches=0).fit(Pairs(), numbers(4))


def test_an_error_in_a_step_is_no_end_of_the_data() -> None:
    class Broken(Pairs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        quiet().validate(Broken(), numbers(2))
