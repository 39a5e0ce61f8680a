"""Several training loaders are read together, and a run goes on exactly within any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.callbacks.progress.bar import batches_to_evaluate
from stratagem.data import CombinedLoader
from stratagem.errors import CheckpointMismatchError, ConfigurationError

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


def numbers(first: int, count: int, *, shuffle: bool = False, seed: int = 0) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(seed) if seed else None
    samples: Any = torch.arange(first, first + count)
    return DataLoader(samples, batch_size=2, shuffle=shuffle, generator=generator)


class Reader(Module):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.read.append([None if part is None else part.tolist() for part in parts])
        total = sum(part.sum() for part in parts if part is not None)
        loss: Tensor = (self.weight - total / 100).square()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.read.append([dataloader_idx, *(None if p is None else p.tolist() for p in parts)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_list_of_numbers_is_a_loader() -> None:
    loader = CombinedLoader({"a": [0, 1, 2], "b": {3: [4, 5]}}, "max_size_cycle")
    assert loader.flattened == [[0, 1, 2], [4, 5]]
    assert [batch for batch, _, _ in loader] == [
        {"a": 0, "b": {3: 4}},
        {"a": 1, "b": {3: 5}},
        {"a": 2, "b": {3: 4}},
    ]
    seen: list[Any] = []

    class Seeing(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    one = trainer()
    one.validate(Seeing(), loader)
    assert seen == [batch for batch, _, _ in loader]
    assert one.run.evaluation_loaders["validation"][0].each == [3, 2]
    assert batches_to_evaluate(one, "validation") == [3]


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        **options,
    )


def combined(mode: Any, *, shuffle: bool = False, seed: int = 0) -> CombinedLoader:
    a = numbers(0, 4, shuffle=shuffle, seed=seed)
    return CombinedLoader({"a": a, "b": numbers(10, 10, shuffle=shuffle, seed=seed)}, mode)


def test_each_mode_reads_its_batches() -> None:
    read = {}
    for mode in MODES:
        model = Reader()
        one = trainer(max_epochs=1)
        one.fit(model, combined(mode))
        assert one.num_training_batches == len(model.read)
        read[mode] = model.read
    a, b = [[0, 1], [2, 3]], [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]
    assert read["min_size"] == [[a[0], b[0]], [a[1], b[1]]]
    assert read["max_size_cycle"] == [[a[i % 2], b[i]] for i in range(5)]
    assert read["max_size"] == [[a[i] if i < 2 else None, b[i]] for i in range(5)]
    assert read["sequential"] == [[one] for one in a + b]


def test_several_training_loaders_are_read_together_and_the_shorter_begin_again() -> None:
    model = Reader()
    trainer(max_epochs=1).fit(model, {"a": numbers(0, 4), "b": numbers(10, 10)})
    assert [part[0] for part in model.read] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_validation_reads_loaders_in_turn_or_together() -> None:
    model = Reader()
    trainer().validate(model, combined("sequential"), verbose=False)
    assert [row[0] for row in model.read] == [0, 0, 1, 1, 1, 1, 1]
    model = Reader()
    trainer().validate(model, combined("max_size"), verbose=False)
    assert model.read[-1] == [0, None, [18, 19]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("done", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 4], ids=["global", "generators"])
def test_a_run_goes_on_exactly_in_the_middle_of_an_epoch(
    mode: Any, done: int, seed: int, tmp_path: Path
) -> None:
    if mode == "min_size" and done > 1:
        done = 3  # an epoch has two batches: the first of the second epoch
    whole = Reader()
    torch.manual_seed(3)
    trainer(max_epochs=2).fit(whole, combined(mode, shuffle=True, seed=seed))

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=done, save_top_k=-1)
    torch.manual_seed(3)
    first = Reader()
    trainer(saver, max_steps=done).fit(first, combined(mode, shuffle=True, seed=seed))
    assert first.read == whole.read[:done]

    resumed = Reader()
    (path,) = (p for p in tmp_path.iterdir() if f"step={done}" in p.name)
    trainer(max_epochs=2).fit(resumed, combined(mode, shuffle=True, seed=seed), ckpt_path=path)
    assert resumed.read == whole.read[done:]
    assert torch.equal(resumed.weight, whole.weight)


def test_a_checkpoint_of_other_loaders_is_refused_within_an_epoch(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer(saver, max_steps=1).fit(Reader(), combined("max_size"))
    (path,) = tmp_path.iterdir()
    with pytest.raises(CheckpointMismatchError, match=r"2 loaders read as 'max_size'.*one loader"):
        trainer(max_epochs=2).fit(Reader(), numbers(0, 8), ckpt_path=path)


def test_loaders_can_be_put_in_the_place_of_others() -> None:
    loader = CombinedLoader({"a": range(1), "b": (range(1), (range(2),))})
    loader.flattened = [range(3), range(4), range(5)]
    assert loader.iterables == {"a": range(3), "b": (range(4), (range(5),))}
    assert len(loader) == 3
    with pytest.raises(ConfigurationError, match=r"length \(1\) and existing length \(3\)"):
        loader.flattened = [range(1)]


@pytest.mark.parametrize("mode", MODES)
def test_combined_loader_starts_parallel_loaders_together(mode: Any) -> None:
    begun = []

    class Noting:
        def __init__(self, first: int) -> None:
            self.first = first

        def __iter__(self) -> Any:
            begun.append(self.first)
            return iter([self.first])

    iter(CombinedLoader([Noting(1), Noting(3)], mode))
    assert begun == ([1] if mode == "sequential" else [1, 3])


def test_combined_loader_refuses_unknown_mode_and_empty_list() -> None:
    with pytest.raises(ConfigurationError, match=r"Unsupported mode 'longest'.*'min_size'"):
        CombinedLoader([numbers(0, 4)], "longest")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least one loader"):
        CombinedLoader([])


def test_ranks_share_each_of_several_loaders(run_script: Any) -> None:
    done = run_script(
        """
        import torch
        from torch.utils.data import DataLoader
        from stratagem import Module, Trainer
        from stratagem.data import CombinedLoader

        class Reader(Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))
                self.read = []
            def training_step(self, batch, batch_idx):
                self.read.append([part.tolist() for part in batch])
                return self.weight * 1.0
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def loader(first, count):
            return DataLoader(torch.arange(first, first + count), batch_size=1)

        model = Reader()
        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(model, CombinedLoader([loader(0, 4), loader(10, 8)], "max_size_cycle"))
        read = [None, None]
        torch.distributed.all_gather_object(read, model.read)
        if trainer.is_global_zero:
            print(read)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "[[[[0], [10]], [[2], [12]], [[0], [14]], [[2], [16]]]" in done.stdout
