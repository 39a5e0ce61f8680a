"""Where Lightning's numbers differ from those of our own Trainer, this Trainer has Lightning's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from stratagem import Trainer as OwnTrainer, seed_everything
from stratagem.callbacks import Callback
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.core.numbers import seed_workers_once
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.loggers import DummyLogger
from stratagem_lightning.api.trainer import Trainer
from stratagem_lightning.api.utilities.samplers import UnrepeatedDistributedSampler

pytestmark = pytest.mark.filterwarnings(
    "ignore::stratagem_lightning.api.utilities.warnings.PossibleUserWarning"
)
"""What is advised against here is what the tests are of, or does not matter to them."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
SAMPLES = 11


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.rates: list[float] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.drawn.append(float(torch.rand(())))
        output: Tensor = self.net(batch[0])
        return output.mean()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        scheduler = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 3}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Unscheduled(Line):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)


def loader(samples: int = 6, **options: Any) -> DataLoader[Any]:
    numbers = torch.arange(1.0, samples + 1).unsqueeze(1)
    return DataLoader(TensorDataset(numbers), batch_size=1, **options)


class Backwards(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["train", "validation", "predict"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_read_the_samples_of_torchs_distributed_sampler(
    rank: int, what: str, shuffle: bool
) -> None:
    seed_everything(7)
    source = loader(SAMPLES, shuffle=shuffle)
    kind = UnrepeatedDistributedSampler if what == "predict" else DistributedSampler
    expected: DistributedSampler[Any] = kind(
        source.dataset, num_replicas=2, rank=rank, seed=7, shuffle=shuffle or what == "train"
    )
    sharded = Trainer(**QUIET).make_sharded_loader(
        source, rank, 2, even=what == "train", name="the data loader", what=what
    )
    for epoch in (0, 3):
        expected.set_epoch(epoch)
        sharded.sampler.set_epoch(epoch)
        assert [int(batch[0]) - 1 for batch in sharded] == list(expected)


def test_one_rank_of_ddp_reads_in_the_order_of_several() -> None:
    seed_everything(7)
    source = loader(SAMPLES)
    expected: DistributedSampler[Any] = DistributedSampler(
        source.dataset, num_replicas=1, rank=0, seed=7
    )
    options: dict[str, Any] = {"even": True, "name": "", "what": "train"}
    sharded = Trainer(**QUIET, strategy="ddp").make_sharded_loader(source, 0, 1, **options)
    assert [int(batch[0]) - 1 for batch in sharded] == list(expected)
    assert Trainer(**QUIET).make_sharded_loader(source, 0, 1, **options) is source


@pytest.mark.parametrize("shuffle", [False, True])
def test_fabric_sampler_keeps_the_shuffle_of_the_loader(shuffle: bool) -> None:
    seed_everything(7)
    source = loader(SAMPLES, shuffle=shuffle)
    expected: DistributedSampler[Any] = DistributedSampler(
        source.dataset, num_replicas=2, rank=1, seed=7, shuffle=shuffle
    )
    sharded = Fabric("cpu")._shard_loader(source, 1, 2)
    assert [int(batch[0]) - 1 for batch in sharded] == list(expected)


def test_a_sampler_of_the_users_own_is_shuffled_and_divided() -> None:
    seed_everything(7)
    samples: Any = range(SAMPLES)
    order: list[int] = list(DistributedSampler(samples, num_replicas=2, rank=1, seed=7))
    sharded = Trainer(**QUIET).make_sharded_loader(
        loader(SAMPLES, sampler=Backwards()), 1, 2, even=True, name="", what="train"
    )
    assert [int(batch[0]) - 1 for batch in sharded] == [SAMPLES - 1 - each for each in order]


def test_overfitting_keeps_the_order() -> None:
    sharded = Trainer(**QUIET, overfit_batches=2).make_sharded_loader(
        loader(SAMPLES, sampler=SequentialSampler(range(SAMPLES))),
        *(1, 2),
        even=True,
        name="",
        what="train",
    )
    assert [int(batch[0]) for batch in sharded] == [2, 4, 6, 8, 10, 1]


def test_a_short_window_is_divided_by_the_number_of_a_whole_one() -> None:
    steps = []
    for trainer in (Trainer, OwnTrainer):
        model = Unscheduled()
        trainer(**QUIET, max_epochs=1, accumulate_grad_batches=4).fit(model, loader())
        steps.append(1 - model.net.weight.item())
    whole = (1 + 2 + 3 + 4) / 4
    assert steps == pytest.approx([whole + (5 + 6) / 4, whole + (5 + 6) / 2])


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        # After the batches 3 and 6 of each epoch; after batch 6 of each epoch.
        (1, [1.0] * 3 + [0.5] * 3 + [0.25] * 3 + [0.125] * 3),
        (2, [1.0] * 6 + [0.5] * 6),
    ],
)
def test_a_frequency_in_steps_counts_the_batches_of_the_epoch(
    accumulate: int, expected: list[float]
) -> None:
    model = Line()
    Trainer(**QUIET, max_epochs=2, accumulate_grad_batches=accumulate).fit(model, loader())
    assert model.rates == expected


def test_loaders_that_are_made_anew_draw_one_more_number() -> None:
    class Reloads(Line):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(2)

    seed_everything(7)
    model = Reloads()
    Trainer(**QUIET, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(model)
    seed_everything(7)
    Reloads()
    expected = []
    for epoch in range(2):
        for _ in range(1 + epoch):  # a loader draws the seed of its workers for each iterator
            torch.empty((), dtype=torch.int64).random_()
        expected += [float(torch.rand(())) for _ in range(2)]
    assert model.drawn == expected


def test_ddp_ranks_reset_the_seed_at_launch() -> None:
    drawn: list[float] = []

    class Draws(Line):
        def on_fit_start(self) -> None:
            drawn.append(float(torch.rand(())))

    for strategy in ("ddp", "auto"):
        seed_everything(7)
        model = Draws()
        torch.rand(5)
        Trainer(**QUIET, strategy=strategy, max_epochs=1).fit(model, loader())
    torch.distributed.destroy_process_group()
    seed_everything(7)
    assert drawn[0] == float(torch.rand(()))
    assert drawn[1] != drawn[0]


class Drawn(Dataset[Any]):
    """A number that a worker draws, and the seed that torch gave to the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return torch.rand(()), torch.tensor(worker.seed)


class Reads(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read.append(batch)
        return self.net(torch.ones(1)).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("divides", [True, False])
def test_workers_are_seeded_once_and_not_for_each_batch(divides: bool) -> None:
    model = Reads()
    trainer = Trainer(max_epochs=1, use_distributed_sampler=divides, **QUIET)
    trainer.fit(model, DataLoader(Drawn(), 2, num_workers=2))
    for worker in range(2):
        drawn, seeds = (torch.cat(part) for part in zip(*model.read[worker::2], strict=True))
        generator = torch.Generator().manual_seed(int(seeds[0]))
        expected = torch.cat([torch.rand(1, generator=generator) for _ in range(4)])
        assert torch.equal(drawn, expected)
    assert trainer.use_distributed_sampler == divides


def test_workers_that_seed_everything_seeds_have_lightnings_seeds() -> None:
    drawn = []

    class Seeds(Drawn):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(torch.initial_seed() % 2**52)

    seed_everything(1, workers=True)
    try:
        for rank in range(2):
            loader = DataLoader(Seeds(), 8, num_workers=1, generator=torch.Generator())
            seeded = seed_workers_once(loader, rank)
            assert seed_workers_once(seeded, rank) is seeded
            drawn.append(int(next(iter(seeded))[0]))
    finally:
        seed_everything(0)
    # What Lightning 2.6.6 has for a generator of the same seed.
    assert drawn == [3826668450767724, 1349136538267669]


def test_options_that_are_no_options_of_a_scheduler_are_left_out() -> None:
    class Net(Line):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            scheduler = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step", "gamma": 0.5}
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "lr": 1.0}

    model = Net()
    with pytest.warns(RuntimeWarning, match="are ignored") as said:
        Trainer(max_epochs=1, **QUIET).fit(model, DataLoader(TensorDataset(torch.ones(3, 1))))
    assert model.rates == [1.0, 0.5, 0.25]
    messages = " ".join(str(one.message) for one in said)
    assert "scheduler with ['gamma']" in messages
    assert "dict with ['lr']" in messages


def test_a_name_logged_of_step_and_epoch_stands_for_the_step_until_the_epoch_ends() -> None:
    values = iter([4.0, 5.0, 6.0, 1.0, 1.0, 1.0])
    seen: list[float] = []

    class Net(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("a", next(values), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(self.trainer.callback_metrics["a"].item())

        def on_train_epoch_end(self) -> None:
            seen.append(self.trainer.callback_metrics["a"].item())

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "interval": "step", "monitor": "a"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    model = Net()
    Trainer(max_epochs=2, **QUIET).fit(model, loader(3))
    assert seen == [4.0, 5.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    # As measured with Lightning 2.6.5.
    assert model.rates == [1.0, 1.0, 0.5, 0.25, 0.25, 0.125]


def test_each_loss_of_lbfgs_counts_in_the_value_of_the_epoch() -> None:
    losses: list[float] = []

    class Net(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = (self.net(batch[0]) - 3.0).square().mean()
            losses.append(loss.item())
            self.log("a", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return LBFGS(self.parameters(), lr=0.1, max_iter=3)

    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), loader(2))
    assert len(losses) == 6
    assert trainer.callback_metrics["a"].item() == pytest.approx(sum(losses) / 6)


def test_a_logger_is_given_the_epoch_as_the_last_of_an_epochs_values() -> None:
    names: list[list[str]] = []

    class Own(DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            names.append(list(metrics))

    class Net(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("a", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=1, **{**QUIET, "logger": Own()})
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(3, 1))))
    assert names == [["a", "epoch"]]


def test_loader_iterators_are_made_before_the_start_hooks() -> None:
    drawn: dict[str, list[int]] = {"train": [], "validation": []}

    class Asked(DataLoader[Any]):
        def __init__(self, what: str) -> None:
            super().__init__(TensorDataset(torch.ones(3, 1)))
            self.what = what

        def __iter__(self) -> Any:
            drawn[self.what].append(-1)
            return super().__iter__()

    class Net(Line):
        def on_train_start(self) -> None:
            drawn["train"].append(0)

        def on_train_epoch_start(self) -> None:
            drawn["train"].append(1)

        def on_validation_start(self) -> None:
            drawn["validation"].append(0)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, **QUIET)
    trainer.fit(Net(), Asked("train"), Asked("validation"))
    assert drawn == {"train": [-1, 0, 1, 1, -1], "validation": [-1, 0, -1, 0]}


@pytest.mark.parametrize("rank", [0, 1])
def test_another_sampler_draws_from_the_rngs_that_were_seeded(rank: int) -> None:
    seed_everything(7)
    source = loader(SAMPLES, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    sharded = Trainer(**QUIET).make_sharded_loader(
        source, rank, 2, even=True, name="", what="train"
    )
    seed_everything(7)
    drawn = list(source.sampler)
    order: list[int] = list(DistributedSampler(drawn, num_replicas=2, rank=rank, seed=7))  # type: ignore[arg-type]
    seed_everything(7)
    assert list(sharded.sampler) == [drawn[each] for each in order]


def test_autocast_casts_a_weight_for_each_use() -> None:
    class Twice(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.net.weight)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).sum() + self.net(batch[0] / 512).sum()  # type: ignore[no-any-return]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.net.weight.grad is not None
            # In bfloat16 the sum would be 1.
            assert self.net.weight.grad.item() == 1 + 1 / 512

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    trainer = Trainer(max_steps=1, precision="bf16-mixed", **QUIET)
    trainer.fit(Twice(), DataLoader(TensorDataset(torch.ones(1, 1))))
    assert trainer.global_step == 1


@pytest.mark.parametrize("overrides", [False, True])
def test_gradients_stay_until_the_next_backward(overrides: bool) -> None:
    class See(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append(("clear", module.layer.weight.grad))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            seen.append(("end", module.layer.weight.grad))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(("epoch", module.layer.weight.grad))

    class Stepped(BoringModel):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    seen: list[tuple[str, Any]] = []
    trainer = Trainer(
        **QUIET, max_epochs=1, accumulate_grad_batches=2, limit_train_batches=4, callbacks=[See()]
    )
    trainer.fit(Stepped() if overrides else BoringModel())
    assert [name for name, _ in seen] == ["clear", "end", "end", "clear", "end", "end", "epoch"]
    gradients = [gradient for _, gradient in seen]
    assert gradients[0] is None
    assert gradients[1] is gradients[2] is gradients[3] is not None
    assert gradients[4] is gradients[5] is gradients[6] is not gradients[3]


def test_on_before_backward_gets_the_loss_that_is_divided() -> None:
    class See(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            seen.append(loss.item())

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            seen.append(outputs["loss"].item())

    seen: list[float] = []
    trainer = Trainer(
        **QUIET, max_epochs=1, accumulate_grad_batches=2, limit_train_batches=3, callbacks=[See()]
    )
    trainer.fit(BoringModel())
    assert len(seen) == 6
    assert seen[::2] == pytest.approx([loss / 2 for loss in seen[1::2]])
