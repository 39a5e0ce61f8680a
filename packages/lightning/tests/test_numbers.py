"""Where Lightning's numbers differ from those of our own Trainer, this Trainer has Lightning's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from stratagem import Trainer as OwnTrainer, seed_everything
from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.fabric import Fabric
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
def test_ranks_of_fabric_shuffle_what_the_loader_shuffles(shuffle: bool) -> None:
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


def test_ranks_seed_again_when_they_join() -> None:
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
