"""A run that was interrupted goes on bit for bit, in the middle of an epoch too."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.data import CombinedLoader

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


pytestmark = pytest.mark.usefixtures("one_thread")


class Augmented(Dataset[Tensor]):
    """Samples with noise from three sources of random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((4,), index / 24) + 0.1 * noise


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = torch.cat(batch) if isinstance(batch, list) else batch  # of several loaders
        loss = (self.net(batch) - 1).square().mean()
        self.losses.append(float(loss.detach()).hex())
        return torch.as_tensor(loss)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class AtEpochEnd(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        trainer.save_checkpoint(self.folder / f"epoch={trainer.current_epoch}.ckpt")


def fit(
    loader: Callable[[], Any],
    folder: Path,
    seed: int,
    *,
    max_steps: int = -1,
    ckpt_path: Path | None = None,
    **options: Any,
) -> list[str]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        max_epochs=3,
        max_steps=max_steps,
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"),
            AtEpochEnd(folder),
        ],
        **options,
    )
    net = Net()
    samples: Any = torch.ones(4, 4)
    trainer.fit(net, loader(), DataLoader(samples, batch_size=2), ckpt_path=ckpt_path)
    return net.losses


def shuffled(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, **arguments)


def with_generators() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(6))
    return DataLoader(Augmented(), batch_size=4, sampler=sampler, generator=generator)


def weighted() -> DataLoader[Any]:
    return DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler(list(range(1, 25)), 24)
    )


def of_single_samples() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=None, shuffle=True)


def custom_batches() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(24)), 4, True))


class OwnSampler(Sampler[int]):
    """A user's sampler, which draws from what it is given or makes itself."""

    def __init__(self, shuffle: Callable[[list[int]], None], held: Any = None) -> None:
        self.shuffle = shuffle
        self.held = held

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        self.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 24


def sampled(sampler: Sampler[int], **arguments: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, sampler=sampler, **arguments)


def python_generator() -> DataLoader[Any]:
    held = random.Random(5)
    return sampled(OwnSampler(held.shuffle, held))


def numpy_generator() -> DataLoader[Any]:
    held = np.random.default_rng(5)
    return sampled(OwnSampler(held.shuffle, held))


class OwnBatches(BatchSampler):
    """Pairs a sample with its neighbour; draws from Python's random numbers."""

    def __init__(self) -> None:
        super().__init__(range(24), 2, False)

    def __iter__(self) -> Iterator[list[int]]:
        pairs = [[first, first + 1] for first in range(0, 24, 2)]
        random.shuffle(pairs)
        return iter(pairs)


class NoiseOfItsOwn(Augmented):
    def __init__(self) -> None:
        self.numbers = np.random.RandomState(5)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 24 + 0.1 * self.numbers.rand())


class Noisy(Augmented):
    """Draws from a generator that it reaches through another object."""

    def __init__(self, draw: Callable[[], float], held: Any = None) -> None:
        self.draw = draw
        self.held = held

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 24 + 0.1 * self.draw())


class Transform:
    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers = random.Random(5)

    def __call__(self) -> float:
        return self.numbers.random()


def of_a_closure() -> Noisy:
    numbers = np.random.default_rng(5)
    return Noisy(lambda: numbers.random())


def of_a_list() -> Noisy:
    transforms = [Transform(), Transform()]
    return Noisy(lambda: sum(transform() for transform in transforms), {"all": transforms})


def noisy(dataset: Noisy) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, shuffle=True)


class NoisyBatches:
    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(5)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + 0.1 * torch.rand((), generator=self.numbers)


class StatefulData(IterableDataset[Tensor]):
    """Draws its samples; goes on by its own state."""

    def __init__(self) -> None:
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        while self.position < 24:
            self.position += 1
            yield torch.full((4,), self.position / 24) + 0.1 * torch.rand(())

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


class StatefulWithoutLength(StatefulData):
    """Begins anew once it was read to its end."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()
        self.position = 0

    __len__ = None  # type: ignore[assignment]


class OwnState(DataLoader[Any]):
    """As torchdata's StatefulDataLoader; what it would save is not enough, so it is not asked."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


EXACT: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "two workers": lambda: shuffled(num_workers=2),
    "persistent workers": lambda: shuffled(num_workers=2, persistent_workers=True),
    "generators": with_generators,
    "weighted": weighted,
    "drop_last": lambda: shuffled(drop_last=True),
    "subset": lambda: sampled(SubsetRandomSampler(range(24))),
    "with replacement": lambda: sampled(RandomSampler(range(24), replacement=True)),
    "distributed, with a seed": lambda: sampled(
        DistributedSampler(range(24), 1, 0, seed=8)  # type: ignore[arg-type]
    ),
    "loader with a state": lambda: OwnState(Augmented(), batch_size=4, shuffle=True),
    "single samples": of_single_samples,
    "custom batches": custom_batches,
    "batch sampler of the user's": lambda: DataLoader(Augmented(), batch_sampler=OwnBatches()),
    "sampler with random.Random": python_generator,
    "sampler with NumPy's generator": numpy_generator,
    "dataset with a RandomState": lambda: DataLoader(NoiseOfItsOwn(), batch_size=4, shuffle=True),
    "generator in a transform": lambda: noisy(Noisy(Transform())),
    "generators in a list of transforms": lambda: noisy(of_a_list()),
    "generator in a closure": lambda: noisy(of_a_closure()),
    "generator of a bound method": lambda: noisy(Noisy(random.Random(5).random)),
    "collate_fn with a generator": lambda: shuffled(collate_fn=NoisyBatches()),
    "dataset with a state": lambda: DataLoader(StatefulData(), batch_size=4),
    "dataset with a state, no length, a short last batch": lambda: DataLoader(
        StatefulWithoutLength(), batch_size=5
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_losses_after_a_resume_equal_an_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    loader = EXACT[kind]
    whole = fit(loader, tmp_path / "whole", seed=1)
    steps = len(whole)
    # In the first epoch, after its last step, at its end, and in the third.
    stops = {"step=2": 2, f"step={steps // 3}": steps // 3, "epoch=0": steps // 3}
    stops[f"step={2 * steps // 3 + 1}"] = 2 * steps // 3 + 1
    for name, stopped in stops.items():
        checkpoint = tmp_path / "whole" / f"{name}.ckpt"
        rest = fit(loader, tmp_path / name, seed=99, ckpt_path=checkpoint)
        assert rest == whole[stopped:], f"resumed from {name} of {steps} steps"


class Endless(Sampler[int]):
    """A sampler without a length; `limit_train_batches` ends the epoch."""

    def __init__(self) -> None:
        self.numbers = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.numbers.randrange(24)


@pytest.mark.filterwarnings("ignore:.*in the middle of an epoch may differ")
def test_a_sampler_may_have_no_length(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return sampled(Endless())

    whole = fit(loader, tmp_path / "whole", seed=1, limit_train_batches=6)
    assert len(whole) == 18
    checkpoint = tmp_path / "whole" / "epoch=0.ckpt"
    rest = fit(loader, tmp_path / "rest", 99, ckpt_path=checkpoint, limit_train_batches=6)
    assert len(rest) == 12


def test_persistent_workers_end_with_the_fit(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    fit(EXACT["persistent workers"], tmp_path, seed=1, max_steps=8)
    assert set(multiprocessing.active_children()) <= before


class OneByOne(OwnSampler):
    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            yield random.randrange(24)


class Counter(OwnSampler):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(7 * self.epoch * index) % 24 for index in range(24)])


class OneIteration(OwnSampler):
    def __init__(self) -> None:
        self.rest = iter(list(range(24)) * 3)

    def __iter__(self) -> Iterator[int]:
        return self.rest


INEXACT: dict[str, tuple[Callable[[], Any], str]] = {
    "iterable": (
        lambda: DataLoader(Counting(), batch_size=4),
        "the dataset of the training data loader is an IterableDataset, of which",
    ),
    "state in workers": (
        lambda: DataLoader(StatefulData(), batch_size=4, num_workers=1),
        "same ones in each process; its state_dict is in the workers",
    ),
    "generator in workers": (
        lambda: DataLoader(NoiseOfItsOwn(), batch_size=4, num_workers=1),
        "holds a RandomState, of which each worker has a copy",
    ),
    "any order": (
        lambda: shuffled(num_workers=2, in_order=False),
        "the training data loader has in_order=False",
    ),
    "one by one": (
        lambda: sampled(OneByOne(random.shuffle)),
        "the sampler of the training data loader draws its indices one by one from the random",
    ),
    "counter": (
        lambda: sampled(Counter(random.shuffle)),
        "the sampler of the training data loader draws from what is not in the checkpoint",
    ),
    "one iteration": (
        lambda: sampled(OneIteration()),
        "the sampler of the training data loader has one iteration only",
    ),
    "no loader": (
        lambda: map(torch.as_tensor, [torch.ones(4, 4)] * 6),
        "the training data loader is a map, of which the batches before are read",
    ),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_inexact_resume_warns_once_at_the_first_save(kind: str, tmp_path: Path) -> None:
    loader, reason = INEXACT[kind]
    with pytest.warns(UserWarning, match="in the middle of an epoch may differ: ") as said:
        fit(loader, tmp_path, seed=1, max_steps=4)
    assert len(said) == 1
    assert reason in str(said[0].message)


def test_looking_at_a_sampler_at_the_first_save_changes_no_random_number(tmp_path: Path) -> None:
    losses = fit(python_generator, tmp_path, seed=1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    net = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        max_epochs=3,
    )
    samples: Any = torch.ones(4, 4)
    trainer.fit(net, python_generator(), DataLoader(samples, batch_size=2))
    assert net.losses == losses


@pytest.mark.parametrize("workers", [0, 1])
def test_validation_loaders_go_on(workers: int, tmp_path: Path) -> None:
    class Validated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.read: list[float] = []

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.read += batch[:, 0].tolist()

    def run(ckpt_path: Path | None) -> tuple[list[float], list[str]]:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            max_epochs=3,
            num_sanity_val_steps=0,
            callbacks=AtEpochEnd(tmp_path),
            enable_checkpointing=False,
        )
        net = Validated()
        numbers: Any = torch.arange(12.0).reshape(12, 1).expand(12, 4)
        generator = torch.Generator().manual_seed(4)
        val = DataLoader(
            numbers,
            batch_size=4,
            shuffle=True,
            generator=generator if workers == 0 else None,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        trainer.fit(net, shuffled(), val, ckpt_path=ckpt_path)
        val._iterator = None  # ends the workers; the garbage collector takes 5 s for each
        return net.read, net.losses

    read, losses = run(None)
    assert run(tmp_path / "epoch=0.ckpt") == (read[12:], losses[6:])


@pytest.mark.parametrize("interval", [2, 0.5])
def test_validation_in_the_middle_of_an_epoch_changes_nothing(
    interval: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": 2}
    whole = fit(shuffled, tmp_path / "whole", seed=1, **options)
    for stopped in (1, 2, 4, 5):
        checkpoint = tmp_path / "whole" / f"step={stopped}.ckpt"
        rest = fit(shuffled, tmp_path / str(stopped), seed=99, ckpt_path=checkpoint, **options)
        assert rest == whole[2 * stopped :]


class Counting(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(24):
            yield torch.full((4,), index / 24)


def test_batches_of_an_iterable_dataset_are_read_and_passed_over(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Counting(), batch_size=4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit(loader, tmp_path / "whole", seed=1)
        rest = fit(loader, tmp_path / "rest", seed=99, ckpt_path=tmp_path / "whole" / "step=2.ckpt")
    assert rest == whole[2:], "it yields the same samples in each process, so nothing is lost"


class GoesOn(IterableDataset[Tensor]):
    """Endless; another iteration goes on where the one before it was left."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield torch.full((4,), self.position / 24) + 0.1 * torch.rand(())

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class BeginsAgain(GoesOn):
    """Endless; another iteration begins again, except after a load."""

    loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


@pytest.mark.filterwarnings("ignore:the checkpoint that is resumed from names .* other")
@pytest.mark.parametrize("several", [False, True], ids=["one", "combined"])
@pytest.mark.parametrize("stream", [GoesOn, BeginsAgain])
def test_a_stream_goes_on_after_an_epoch_that_a_limit_ended(
    stream: Callable[[], Any], several: bool, tmp_path: Path
) -> None:
    def loader() -> Any:
        one = DataLoader(stream(), batch_size=4)
        if not several:
            return one
        return CombinedLoader([one, shuffled()], mode="max_size_cycle")

    whole = fit(loader, tmp_path / "whole", seed=1, limit_train_batches=4)
    assert len(whole) == 12
    # In the epoch, after its last step, at its end, and at the end of one that was resumed before
    # its last step.
    places = [("whole", "step=2", 2), ("whole", "step=3", 3), ("whole", "step=4", 4)]
    places += [("whole", "epoch=0", 4), ("whole", "epoch=1", 8), ("whole-step=3", "epoch=0", 4)]
    for folder, name, stopped in places:
        rest = fit(
            loader,
            tmp_path / f"{folder}-{name}",
            seed=99,
            ckpt_path=tmp_path / folder / f"{name}.ckpt",
            limit_train_batches=4,
        )
        assert rest == whole[stopped:], (folder, name)


class Drawn(IterableDataset[Tensor]):
    """Draws its samples from a generator that it holds, or that a dataset in it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(24):
            if isinstance(self.held, torch.Generator):
                noise = float(torch.rand((), generator=self.held))
            else:
                noise = self.held.random()
            yield torch.full((4,), index / 24) + 0.1 * noise

    def __len__(self) -> int:
        return 24


class DrawnWithState(Drawn):
    """Goes on by its own state, in which the generator is not."""

    def __init__(self, held: Any) -> None:
        super().__init__(held)
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        while self.position < 24:
            self.position += 1
            yield torch.full((4,), self.position / 24 + float(torch.rand((), generator=self.held)))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


@pytest.mark.filterwarnings("ignore:.*in the middle of an epoch may differ")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Drawn(torch.Generator().manual_seed(3)),
        lambda: Drawn(random.Random(3)),
        lambda: Drawn(np.random.default_rng(3)),
        lambda: DrawnWithState(torch.Generator().manual_seed(3)),
    ],
    ids=["torch", "random", "numpy", "with a state"],
)
def test_a_generator_that_an_iterable_dataset_holds_goes_on(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(make(), batch_size=4)

    whole = fit(loader, tmp_path / "whole", seed=1)
    assert len(whole) == 18
    for name, stopped in [
        *((f"step={step}", step) for step in range(1, 18)),
        ("epoch=0", 6),
        ("epoch=1", 12),
    ]:
        checkpoint = tmp_path / "whole" / f"{name}.ckpt"
        rest = fit(loader, tmp_path / name, seed=99, ckpt_path=checkpoint)
        assert rest == whole[stopped:], f"resumed from {name}"


class Stateful:
    """A loader with a state of its own, as torchdata's."""

    def __init__(self) -> None:
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.loaded = self.loaded, 0
        while self.position < 6:
            self.position += 1
            yield torch.full((2, 4), self.position / 6)

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


def test_stateful_dataloader_resumes_by_its_state(tmp_path: Path) -> None:
    whole = fit(Stateful, tmp_path / "whole", seed=1)
    checkpoint = tmp_path / "whole" / "step=8.ckpt"
    assert fit(Stateful, tmp_path / "rest", seed=99, ckpt_path=checkpoint) == whole[8:]


SCRIPT = (SCRIPTS / "exact_resume.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_goes_on_with_its_own_random_numbers(
    workers: int, run_script: RunScript, tmp_path: Path
) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run_script(textwrap.dedent(SCRIPT), "1", str(whole), "", str(workers))
    run_script(textwrap.dedent(SCRIPT), "50", str(rest), str(whole / "step=4.ckpt"), str(workers))
    for rank in range(2):
        losses = json.loads((whole / f"losses{rank}.json").read_text())
        assert json.loads((rest / f"losses{rank}.json").read_text()) == losses[4:]
    assert losses != json.loads((whole / "losses0.json").read_text()), "ranks differ"


# ---------------------------------------------------------------- within an accumulation window


class Saving(Callback):
    """Asks for a checkpoint at each micro-batch, and notes what is there right after."""

    def __init__(self, folder: Path, event: str) -> None:
        self.folder = folder
        self.at_once: list[bool] = []
        setattr(self, event, self.save)

    def save(self, trainer: Trainer, module: Module, *_: Any) -> None:
        path = self.folder / f"asked{len(self.at_once)}.ckpt"
        trainer.save_checkpoint(path)
        assert path.exists() is not trainer.is_within_step
        self.at_once.append(path.exists())


def accumulated(folder: Path, seed: int, *callbacks: Callback, **options: Any) -> list[str]:
    """Return the losses of two epochs of 8 batches, 3 for a step, so that the last has 2."""
    torch.manual_seed(seed)
    random.seed(seed)
    net = Net()
    net.net.insert(1, nn.BatchNorm1d(8))
    samples = Augmented()
    loader = DataLoader(samples, batch_size=3, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        max_epochs=2,
        accumulate_grad_batches=3,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        default_root_dir=folder,
    )
    trainer.fit(net, loader, **options)
    running = net.net[1].running_mean
    assert isinstance(running, Tensor)
    return [*net.losses, str(running.tolist())]


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_train_batch_start"])
def test_save_checkpoint_within_a_step_is_exact(event: str, tmp_path: Path) -> None:
    saving = Saving(tmp_path, event)
    np.random.seed(3)
    whole = accumulated(tmp_path, 1, saving)
    at_end = [False, False, True, False, False, True, False, True]
    assert saving.at_once == (at_end * 2 if event == "on_train_batch_end" else [False] * 16)
    for number, trained in ((0, 3), (1, 3), (2, 3), (4, 6), (6, 8), (9, 11), (12, 14)):
        path = tmp_path / f"asked{number}.ckpt"
        assert accumulated(tmp_path, 99, ckpt_path=path) == whole[trained:], f"asked{number}"


def test_weights_alone_are_saved_within_a_step(tmp_path: Path) -> None:
    class Weights(Callback):
        def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            assert trainer.is_within_step
            assert (tmp_path / "weights.ckpt").exists()

    accumulated(tmp_path, 1, Weights())


def test_train_time_interval_removes_after_the_step(
    tmp_path: Path,
) -> None:
    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            there = len(list(tmp_path.glob("*.ckpt")))
            # Called before the saver: what is there is the step's before.
            assert there == min(trainer.global_step - (not trainer.is_within_step), 1)

    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), filename="{step}")
    accumulated(tmp_path, 1, Look(), saver)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=6.ckpt"]


def test_sigterm_within_a_step_ends_the_run_after_the_step(tmp_path: Path) -> None:
    class Terminated(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 4:
                signal.raise_signal(signal.SIGTERM)

    np.random.seed(3)
    whole = accumulated(tmp_path, 1)
    np.random.seed(3)
    saver = ModelCheckpoint(tmp_path / "saved")
    with pytest.raises(SystemExit):
        accumulated(tmp_path, 1, Terminated(), saver)
    (path,) = (tmp_path / "saved").glob("interrupted-step=2.ckpt")
    assert accumulated(tmp_path, 99, ckpt_path=path) == whole[6:]


def test_save_after_an_error_within_a_step_warns(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 4:
                raise RuntimeError("it fails here")

        def on_exception(self, trainer: Trainer, module: Module, error: BaseException) -> None:
            with pytest.warns(UserWarning, match="within an optimizer step that an error has end"):
                trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(RuntimeError, match="it fails here"):
        accumulated(tmp_path, 1, Fails())
    # The step's three batches are taken again.
    assert len(accumulated(tmp_path, 1, ckpt_path=tmp_path / "failed.ckpt")) == 16 - 3 + 1
