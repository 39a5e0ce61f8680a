"""Checkpoints: whole or not there, safe to load, and training goes on as if nothing happened."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, lr_scheduler as schedulers
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, DataModule, Lite, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.checkpoint import CheckpointIO, DirectoryCheckpointIO, SingleFileCheckpointIO
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ConfigurationError,
    UserCodeError,
)
from stratagem.state.state_dict import load_named_state, named_state, with_names

# ---------------------------------------------------------------- the file

WRITER = """
import sys, torch
from stratagem.checkpoint import SingleFileCheckpointIO
io = SingleFileCheckpointIO()
print("ready", flush=True)
for number in range(1_000_000):
    weights = torch.full((500_000,), float(number))
    io.save_checkpoint({"number": number, "weights": weights}, sys.argv[1])
"""


def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    path = tmp_path / "model.ckpt"
    io = SingleFileCheckpointIO()
    io.save_checkpoint({"number": -1, "weights": torch.full((500_000,), -1.0)}, path)
    for delay in (0.0, 0.005, 0.02, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env=script_environment,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        loaded = io.load_checkpoint(path)
        assert (loaded["weights"] == float(loaded["number"])).all()


def test_a_checkpoint_is_written_beside_its_target_synced_then_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    target = tmp_path / "model.ckpt"
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        what = Path(f"/proc/self/fd/{descriptor}").resolve()
        calls.append("fsync the directory" if what == tmp_path else f"fsync in {what.parent}")
        fsync(descriptor)

    def note_replace(source: Any, destination: Any) -> None:
        assert Path(source).parent == tmp_path
        assert not target.exists()
        calls.append(f"rename to {Path(destination).name}")
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    SingleFileCheckpointIO().save_checkpoint({"a": 1}, target)
    assert calls == [f"fsync in {tmp_path}", "rename to model.ckpt", "fsync the directory"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.ckpt"
    io = SingleFileCheckpointIO()
    io.save_checkpoint({"number": 1}, path)

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"number": 2}, path)
    assert io.load_checkpoint(path) == {"number": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.ckpt"]


def test_a_checkpoint_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "model.ckpt").stat().st_mode & 0o777 == 0o640


def test_saving_makes_no_second_copy_in_memory(run_script: Callable[..., Any]) -> None:
    finished = run_script("""
        import resource, torch
        from stratagem.checkpoint import SingleFileCheckpointIO
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        io = SingleFileCheckpointIO()
        io.save_checkpoint({"weights": torch.ones(1000)}, "small.ckpt")
        weights = {str(i): torch.ones(5_000_000) for i in range(10)}  # 200 MB
        before = peak()
        io.save_checkpoint({"weights": weights}, "large.ckpt")
        print(peak() - before)
    """)
    assert int(finished.stdout) < 16


def test_safe_data_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.ckpt"
    io = SingleFileCheckpointIO()
    contents = {
        "numbers": [1, 2.5, True, None, 1 + 2j],
        "text": ("a", b"b"),
        "set": {1, 2},
        "nested": {"deep": {0: torch.arange(3), "size": torch.Size([2])}},
        "dtype": torch.bfloat16,
    }
    io.save_checkpoint(contents, path)
    loaded = io.load_checkpoint(path)
    assert torch.equal(loaded["nested"]["deep"].pop(0), contents["nested"]["deep"].pop(0))  # type: ignore[index]
    assert loaded == contents
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def test_load_checkpoint_refuses_executable_content(tmp_path: Path) -> None:
    path, marker = tmp_path / "evil.ckpt", tmp_path / "executed"
    torch.save({"state_dict": Evil(marker)}, path)
    with pytest.raises(CheckpointCorruptError) as caught:
        SingleFileCheckpointIO().load_checkpoint(path)
    assert str(caught.value).startswith(
        f"'{path}' holds something that loading would have to execute, so it was refused: "
    )
    assert str(caught.value).endswith("Only load checkpoints of weights-only-safe data")
    path.write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(CheckpointCorruptError, match=r"evil\.ckpt"):
        SingleFileCheckpointIO().load_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 2000, -10])
def test_a_truncated_checkpoint_is_called_one(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    io = SingleFileCheckpointIO()
    io.save_checkpoint({"weights": torch.ones(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(CheckpointCorruptError) as caught:
        io.load_checkpoint(path)
    size = len(whole[:kept])
    assert str(caught.value).startswith(f"'{path}' is not a whole checkpoint ({size} bytes): ")
    assert str(caught.value).endswith("It may be truncated; use an older one")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("These are notes, not weights.\n" * 100)
    with pytest.raises(CheckpointCorruptError, match=r"notes\.txt"):
        SingleFileCheckpointIO().load_checkpoint(text)
    with pytest.raises(CheckpointNotFoundError, match=r"is a directory without 'manifest\.json'"):
        SingleFileCheckpointIO().load_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointCorruptError) as caught:
        SingleFileCheckpointIO().load_checkpoint(tmp_path / "list.ckpt")
    assert str(caught.value) == (
        f"'{tmp_path / 'list.ckpt'}' holds a list; expected a dict of state"
    )


def test_a_missing_checkpoint_is_not_found_and_its_neighbours_are_listed(tmp_path: Path) -> None:
    io = SingleFileCheckpointIO()
    with pytest.raises(CheckpointNotFoundError) as caught:
        io.load_checkpoint(tmp_path / "nowhere.ckpt")
    assert str(caught.value) == (
        f"no checkpoint '{tmp_path / 'nowhere.ckpt'}'; the folder '{tmp_path}' contains no "
        "checkpoints"
    )
    assert isinstance(caught.value, FileNotFoundError)
    for name in ("b", "a"):
        io.save_checkpoint({}, tmp_path / f"{name}.ckpt")
    with pytest.raises(CheckpointNotFoundError, match=r"contains a\.ckpt, b\.ckpt$"):
        io.load_checkpoint(tmp_path / "nowhere.ckpt")


def test_save_checkpoint_refuses_unsafe_types(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    with pytest.raises(CheckpointContentError) as caught:
        SingleFileCheckpointIO().save_checkpoint({"a": [1, {"b": (Path("x"),)}]}, path)
    assert str(caught.value) == (
        f"cannot save {path}: checkpoint['a'][1]['b'][0] is of type {type(Path()).__module__}."
        f"{type(Path()).__qualname__}, which could not be loaded without executing code. Store "
        "numbers, strings, tensors, and dicts, lists, tuples and sets of them"
    )
    assert list(tmp_path.iterdir()) == []


class Tagged(Tensor):
    """A tensor of a user's own class."""


def test_save_checkpoint_refuses_unknown_tensor_classes(tmp_path: Path) -> None:
    io, path = SingleFileCheckpointIO(), tmp_path / "model.ckpt"
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        io.save_checkpoint({"x": tensor}, path)
        assert type(io.load_checkpoint(path)["x"]) is type(tensor)
    for odd in (torch.ones(2).as_subclass(Tagged), nn.UninitializedParameter()):
        with pytest.raises(CheckpointContentError, match=rf"\['x'\] is of .*{type(odd).__name__},"):
            io.save_checkpoint({"state_dict": {"x": odd}}, tmp_path / "odd.ckpt")
    with torch.serialization.safe_globals([Tagged]):
        io.save_checkpoint({"x": torch.ones(2).as_subclass(Tagged)}, path)
        assert type(io.load_checkpoint(path)["x"]) is Tagged


def test_data_that_contain_themselves_or_are_too_deep_are_refused_at_the_save(
    tmp_path: Path,
) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    for io, data in itertools.product(
        (SingleFileCheckpointIO(), DirectoryCheckpointIO()), (cyclic, deep)
    ):
        with pytest.raises(CheckpointContentError, match="contains itself or is nested too deeply"):
            io.save_checkpoint({"x": data}, tmp_path / "model.ckpt")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- a run to save


class Net(Module):
    """A small regression with what a resume has to bring back: momenta, rates, batch statistics."""

    def __init__(self, width: int = 6, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(
                nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1)
            )
        self.rate = rate
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        indices, inputs, targets = batch
        self.seen += indices.tolist()
        loss = mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val_loss", mse_loss(self.net(inputs), targets))

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=self.rate)
        return [optimizer], [
            StepLR(optimizer, 1, 0.8),
            {"scheduler": StepLR(optimizer, 3, 0.9), "interval": "step"},
        ]


def loader(samples: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 3, generator=generator)
    data = TensorDataset(torch.arange(samples), inputs, inputs.prod(1, keepdim=True))
    return DataLoader(data, batch_size=4)


def trainer_in(folder: Path, **arguments: Any) -> Trainer:
    arguments = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": folder,
        **arguments,
    }
    return Trainer(**arguments)


def assert_same_state(one: Trainer, other: Trainer) -> None:
    """Both runs stand at the same place, bit for bit."""
    assert one.run is not None
    assert other.run is not None
    assert (one.global_step, one.current_epoch) == (other.global_step, other.current_epoch)
    for name, value in one.run.module.state_dict().items():
        assert torch.equal(value, other.run.module.state_dict()[name]), name
    for mine, theirs in zip(one.optimizers, other.optimizers, strict=True):
        state, wanted = mine.state_dict(), theirs.state_dict()
        assert state["param_groups"] == wanted["param_groups"]
        for index, entries in state["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, wanted["state"][index][key]), (index, key)
    for mine_config, their_config in zip(
        one.lr_scheduler_configs, other.lr_scheduler_configs, strict=True
    ):
        assert mine_config.scheduler.state_dict() == their_config.scheduler.state_dict()


# ---------------------------------------------------------------- resuming


def test_two_epochs_and_two_resumed_equal_four_at_once(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "whole", max_epochs=4)
    whole.fit(Net(), loader(), loader(8))

    first = trainer_in(tmp_path / "half", max_epochs=2)
    first.fit(Net(), loader(), loader(8))
    model = Net()
    resumed = trainer_in(tmp_path / "resumed", max_epochs=4)
    assert first.checkpoint_callback is not None
    resumed.fit(model, loader(), loader(8), ckpt_path=first.checkpoint_callback.best_model_path)
    assert model.seen == list(range(40)) * 2
    assert_same_state(resumed, whole)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("saved_at", [3, 6, 10])
def test_training_resumes_in_the_middle_of_an_epoch_with_the_next_batch(
    accumulate: int, saved_at: int, tmp_path: Path
) -> None:
    whole = trainer_in(
        tmp_path / "whole", max_epochs=4, accumulate_grad_batches=accumulate, num_sanity_val_steps=0
    )
    everything = Net()
    whole.fit(everything, loader(), loader(8))

    class Killed(BaseException):
        pass

    class Kill(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == saved_at + 1:
                raise Killed

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=saved_at)
    killed = trainer_in(
        tmp_path,
        max_epochs=4,
        accumulate_grad_batches=accumulate,
        callbacks=[saver, Kill()],
    )
    with pytest.raises(Killed):
        killed.fit(Net(), loader(), loader(8))

    model = Net()
    resumed = trainer_in(tmp_path, max_epochs=4, accumulate_grad_batches=accumulate)
    resumed.fit(model, loader(), loader(8), ckpt_path=saver.best_model_path)
    assert_same_state(resumed, whole)
    steps_per_epoch = math.ceil(10 / accumulate)
    epochs, steps = divmod(saved_at, steps_per_epoch)
    trained = 40 * epochs + 4 * accumulate * steps
    assert everything.seen == list(range(40)) * 4
    assert model.seen == everything.seen[trained:]
    # The validation at the end of the epoch comes after resuming as well.
    assert resumed.callback_metrics["val_loss"] == whole.callback_metrics["val_loss"]


def test_save_checkpoint_between_micro_batches_follows_their_step(
    tmp_path: Path,
) -> None:
    class SaveWithin(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.current_epoch == 0 and batch_idx == 4:  # the second of the window 3, 4, 5
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    whole = trainer_in(tmp_path, max_epochs=2, accumulate_grad_batches=3, callbacks=[SaveWithin()])
    whole.fit(Net(), loader())
    model = Net()
    resumed = trainer_in(tmp_path, max_epochs=2, accumulate_grad_batches=3)
    resumed.fit(model, loader(), ckpt_path=tmp_path / "within.ckpt")
    assert model.seen == [*range(24, 40), *range(40)]
    assert_same_state(resumed, whole)


def test_a_value_that_a_scheduler_waits_for_counts_once_across_a_resume(tmp_path: Path) -> None:
    class Plateau(Net):
        values = (3.0, 2.0, 2.5, 2.4, 1.0, 1.5)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.values[self.current_epoch])

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    whole = trainer_in(tmp_path / "whole", max_epochs=6)
    whole.fit(Plateau(), loader(), loader(8))
    for where in (True, False):
        saver = ModelCheckpoint(
            tmp_path / f"saved-{where}", save_top_k=-1, save_on_train_epoch_end=where
        )
        first = trainer_in(tmp_path, max_epochs=3, callbacks=saver)
        first.fit(Plateau(), loader(), loader(8))
        resumed = trainer_in(tmp_path / "resumed", max_epochs=6)
        resumed.fit(Plateau(), loader(), loader(8), ckpt_path=saver.best_model_path)
        assert_same_state(resumed, whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.CosineAnnealingLR(o, 5),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=50),
        lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: schedulers.MultiStepLR(o, [1, 2]),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: schedulers.PolynomialLR(o, 5),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 3)], [2]
        ),
        lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), StepLR(o, 1)], o),
    ],
)
def test_every_kind_of_scheduler_is_saved_and_brought_back(make: Any, tmp_path: Path) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=0.05)
            return [optimizer], [{"scheduler": make(optimizer), "interval": "epoch"}]

    whole = trainer_in(tmp_path / "whole", max_epochs=3)
    whole.fit(Scheduled(), loader(8))
    first = trainer_in(tmp_path / "half", max_epochs=1)
    first.fit(Scheduled(), loader(8))
    assert first.checkpoint_callback is not None
    resumed = trainer_in(tmp_path / "resumed", max_epochs=3)
    resumed.fit(Scheduled(), loader(8), ckpt_path=first.checkpoint_callback.best_model_path)
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        whole.optimizers[0].param_groups[0]["lr"]
    )


def test_users_states_are_saved_and_brought_back(tmp_path: Path) -> None:
    got: dict[str, Any] = {}

    class Counts(Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            got["callback"] = state["count"]

        def on_save_checkpoint(
            self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
        ) -> None:
            checkpoint["from_callback"] = 1

        def on_load_checkpoint(
            self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
        ) -> None:
            got["from_callback"] = checkpoint["from_callback"]

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"read": 40}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            got["data"] = state["read"]

    class Extra(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["from_module"] = torch.ones(2)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            got["from_module"] = checkpoint["from_module"].tolist()

    first = trainer_in(tmp_path, max_epochs=1, callbacks=[Counts()])
    first.fit(Extra(), datamodule=Data())
    assert first.checkpoint_callback is not None
    path = first.checkpoint_callback.best_model_path
    checkpoint = SingleFileCheckpointIO().load_checkpoint(path)
    trainer_in(tmp_path, max_epochs=2, callbacks=[Counts()]).fit(
        Extra(), datamodule=Data(), ckpt_path=path
    )
    assert got == {"callback": 10, "from_callback": 1, "data": 40, "from_module": [1.0, 1.0]}
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (0, 10)
    assert checkpoint["hyper_parameters"] == {"width": 6, "rate": 0.05}


def test_best_and_last_are_paths(tmp_path: Path) -> None:
    class Scripted(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", (0.5, 0.9, 0.7)[self.current_epoch])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weights", self.net[0].weight.sum())  # type: ignore[operator]

    saver = ModelCheckpoint(tmp_path, monitor="score", mode="max", save_last=True)
    trainer = trainer_in(tmp_path, max_epochs=3, callbacks=saver)
    model = Scripted()
    trainer.fit(model, loader(), loader(8))
    assert saver.best_model_score == pytest.approx(0.9)
    assert saver.best_model_path == str(tmp_path / "epoch=1-step=20.ckpt")
    assert saver.last_model_path == str(tmp_path / "last.ckpt")

    def weights(path: str) -> float:
        state = SingleFileCheckpointIO().load_checkpoint(path)["state_dict"]
        return float(state["net.0.weight"].sum())

    best = trainer.test(model, loader(8), ckpt_path="best", verbose=False)[0]
    assert best["weights"] == pytest.approx(weights(saver.best_model_path))
    last = trainer.test(model, loader(8), ckpt_path="last", verbose=False)[0]
    assert last["weights"] == pytest.approx(weights(saver.last_model_path))
    assert best != last
    # In another process the newest file in the same folder is the last.
    again = trainer_in(tmp_path, max_epochs=3, callbacks=ModelCheckpoint(tmp_path))
    resumed = Scripted()
    again.fit(resumed, loader(), loader(8), ckpt_path="last")
    assert resumed.seen == []
    assert again.global_step == 30


# ---------------------------------------------------------------- which are kept


class Scored(Net):
    """Logs a given score at each epoch's validation."""

    def __init__(self, scores: tuple[float, ...]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch])


def kept(folder: Path) -> list[int]:
    """The epochs whose checkpoints are in a folder."""
    return sorted(int(p.name.split("=")[1].split("-")[0]) for p in folder.glob("epoch=*.ckpt"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "mode", "top", "epochs", "best"),
    [
        ((3.0, 1.0, 2.0, 0.5), "min", 1, [3], 3),
        ((3.0, 1.0, 2.0, 0.5), "max", 1, [0], 0),
        ((3.0, 1.0, 2.0, 0.5), "min", 2, [1, 3], 3),
        ((3.0, 1.0, 2.0, 0.5), "max", 3, [0, 1, 2], 0),
        ((3.0, 1.0, 2.0, 0.5), "max", -1, [0, 1, 2, 3], 0),
        ((3.0, 1.0, 2.0, 0.5), "max", 0, [], None),
        ((1.0, 1.0, 1.0, 1.0), "min", 1, [0], 0),
        ((NAN, 2.0, NAN, 1.0), "min", 1, [3], 3),
        ((NAN, 2.0, NAN, 1.0), "max", 1, [1], 1),
        ((NAN, 2.0, NAN, 1.0), "max", 2, [1, 3], 1),
        ((2.0, NAN, 3.0, NAN), "min", 3, [0, 1, 2], 0),
    ],
)
def test_the_best_are_kept(
    scores: tuple[float, ...],
    mode: Any,
    top: int,
    epochs: list[int],
    best: int | None,
    tmp_path: Path,
) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="score", mode=mode, save_top_k=top)
    trainer = trainer_in(tmp_path, max_epochs=4, limit_train_batches=1, callbacks=saver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Scored(scores), loader(), loader(4))
    # Once, however often it comes about.
    assert [str(warning.message) for warning in caught] == [
        f"step {scores.index(NAN) + 1}: ModelCheckpoint(monitor='score'): the value is NaN. NaN is "
        "the worst value in either mode: such a checkpoint takes the place of no better one"
        for _ in range(NAN in scores)
    ]
    assert kept(tmp_path) == epochs
    assert len(saver.best_k_models) == len(epochs)
    if best is None:
        assert saver.best_model_path == ""
    else:
        assert f"epoch={best}-" in saver.best_model_path
        assert saver.best_model_score == scores[best]


def test_without_a_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path)
    trainer_in(tmp_path, max_epochs=3, callbacks=saver).fit(Net(), loader())
    assert kept(tmp_path) == [2]
    assert saver.best_model_path == str(tmp_path / "epoch=2-step=30.ckpt")
    assert saver.best_model_score is None


def test_every_n_epochs_and_every_n_steps(tmp_path: Path) -> None:
    epochs = ModelCheckpoint(tmp_path / "epochs", every_n_epochs=2, save_top_k=-1)
    steps = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=4, save_top_k=-1)
    trainer_in(tmp_path, max_epochs=3, callbacks=[epochs, steps]).fit(Net(), loader(20), loader(4))
    assert kept(tmp_path / "epochs") == [1]
    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == [
        "epoch=0-step=4.ckpt",
        "epoch=1-step=8.ckpt",
        "epoch=2-step=12.ckpt",
    ]


def test_time_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nonlocal now
            now += 3.0
            return super().training_step(batch, batch_idx)

    clock_of_runs = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("stratagem.trainer.loops.interruption.time", clock_of_runs)
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=10), save_top_k=-1)
    trainer_in(tmp_path, max_epochs=1, callbacks=saver).fit(Slow(), loader())
    # Ten steps of 3 seconds: 10 seconds have gone by after the fourth, and again after the eighth.
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "epoch=0-step=4.ckpt",
        "epoch=0-step=8.ckpt",
    ]


@pytest.mark.parametrize("monitor", ["train_loss_epoch", "train_loss", "val_loss"])
def test_values_of_training_and_of_validation_can_both_be_monitored(
    monitor: str, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, monitor=monitor, save_top_k=-1)
    trainer = trainer_in(tmp_path, max_epochs=2, callbacks=[saver, EarlyStopping(monitor)])
    trainer.fit(Net(), loader(), loader(8))
    assert kept(tmp_path) == [0, 1]
    assert saver.best_model_score == min(saver.best_k_models.values())
    assert float(trainer.callback_metrics[monitor]) in saver.best_k_models.values()


def test_a_value_of_a_step_can_be_monitored_every_n_steps(tmp_path: Path) -> None:
    class Falling(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("now", float(-self.global_step))
            return super().training_step(batch, batch_idx)

    saver = ModelCheckpoint(
        tmp_path, monitor="now", every_n_train_steps=4, filename="{step}-{now:.1f}"
    )
    trainer_in(tmp_path, max_epochs=1, callbacks=saver).fit(Falling(), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["step=8-now=-7.0.ckpt"]


def test_epochs_without_validation_are_passed_over(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=-1)
    each = ModelCheckpoint(tmp_path / "each", save_top_k=-1)
    trainer_in(
        tmp_path,
        max_epochs=4,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        callbacks=[saver, each, EarlyStopping("val_loss", patience=5)],
    ).fit(Net(), loader(), loader(8))
    assert kept(tmp_path / "best") == [1, 3]
    assert kept(tmp_path / "each") == [0, 1, 2, 3]


def test_with_validation_in_the_middle_of_epochs_each_is_judged(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
    trainer_in(tmp_path, max_epochs=1, val_check_interval=5, callbacks=saver).fit(
        Net(), loader(), loader(8)
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "epoch=0-step=10.ckpt",
        "epoch=0-step=5.ckpt",
    ]


def test_training_that_stops_in_the_middle_of_an_epoch_leaves_a_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "newest")
    # Nothing was validated by then, so there is no value to judge by, and no reason to fail.
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_last=True)
    trainer_in(tmp_path, max_steps=13, check_val_every_n_epoch=5, callbacks=[saver, best]).fit(
        Net(), loader(), loader(8)
    )
    assert [path.name for path in (tmp_path / "newest").iterdir()] == ["epoch=1-step=13.ckpt"]
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == [
        "epoch=1-step=13.ckpt",
        "last.ckpt",
    ]


class Watching(SingleFileCheckpointIO):
    """Notes the order of saves, links and removals."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, path)
        self.calls.append(f"saved {Path(path).name}")

    def remove_checkpoint(self, path: str | Path) -> None:
        super().remove_checkpoint(path)
        self.calls.append(f"removed {Path(path).name}")

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        self.calls.append(f"{Path(path).name} names {Path(target).name}")
        return super().link_checkpoint(target, path)


def test_the_old_one_goes_once_the_new_one_is_there(tmp_path: Path) -> None:
    io = Watching()
    assert isinstance(io, CheckpointIO)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_last=True)
    trainer_in(tmp_path, max_epochs=2, callbacks=saver, plugins=io).fit(Net(), loader())
    assert io.calls == [
        "saved epoch=0.ckpt",
        "last.ckpt names epoch=0.ckpt",
        "saved epoch=1.ckpt",
        "last.ckpt names epoch=1.ckpt",
        "removed epoch=0.ckpt",
    ]


def test_another_runs_files_are_not_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        trainer_in(
            tmp_path, max_epochs=1, callbacks=ModelCheckpoint(tmp_path, filename="model")
        ).fit(Net(), loader())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model-v1.ckpt", "model.ckpt"]


@pytest.mark.parametrize(("save_top_k", "expected"), [(1, ["best"]), (2, ["best", "best-v1"])])
def test_a_name_that_stays_the_same_replaces_the_runs_own_file(
    tmp_path: Path, save_top_k: int, expected: list[str]
) -> None:
    saver = ModelCheckpoint(
        tmp_path, filename="best", monitor="step", mode="max", save_top_k=save_top_k
    )
    trainer_in(tmp_path, max_epochs=4, callbacks=saver).fit(Net(), loader())
    assert sorted(p.stem for p in tmp_path.iterdir()) == expected
    assert torch.load(saver.best_model_path)["epoch"] == 3


def test_resumed_run_continues_save_top_k(tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, monitor="score", mode="max", save_top_k=2)

    scores = (0.9, 0.5, 0.7, 0.8)
    first = saver()
    trainer_in(tmp_path, max_epochs=2, callbacks=first).fit(Scored(scores), loader(), loader(4))
    assert kept(tmp_path) == [0, 1]
    second = saver()
    trainer_in(tmp_path, max_epochs=4, callbacks=second).fit(
        Scored(scores), loader(), loader(4), ckpt_path=tmp_path / "epoch=1-step=20.ckpt"
    )
    assert kept(tmp_path) == [0, 1, 3]  # what the user has named, too
    assert second.best_model_path == str(tmp_path / "epoch=0-step=10.ckpt")


def test_the_default_folder_is_beside_the_logs(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1, logger=True)
    trainer.fit(Net(), loader())
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_model_path == str(
        tmp_path / "stratagem_logs" / "version_0" / "checkpoints" / "epoch=0-step=10.ckpt"
    )


def test_weights_only_leaves_the_state_of_training_out(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer_in(tmp_path, max_epochs=1, callbacks=saver).fit(Net(), loader())
    checkpoint = SingleFileCheckpointIO().load_checkpoint(saver.best_model_path)
    assert "optimizer_states" not in checkpoint
    assert "progress" not in checkpoint
    with pytest.raises(CheckpointMismatchError) as caught:
        trainer_in(tmp_path, max_epochs=2).fit(Net(), loader(), ckpt_path=saver.best_model_path)
    assert str(caught.value) == (
        f"'{saver.best_model_path}' holds weights only, so training cannot be resumed from it: "
        "load them with Module.load_from_checkpoint and fit without ckpt_path"
    )
    trainer_in(tmp_path).validate(Net(), loader(8), ckpt_path=saver.best_model_path, verbose=False)


# ---------------------------------------------------------------- loading elsewhere


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of Net(width=5) after an epoch."""
    trainer = trainer_in(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Net(width=5), loader())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


def test_a_model_is_made_from_a_checkpoint_with_its_hyperparameters(saved: Path) -> None:
    model = Net.load_from_checkpoint(saved, rate=0.5)
    assert (model.hparams.width, model.hparams.rate) == (5, 0.5)
    state = SingleFileCheckpointIO().load_checkpoint(saved)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for where in ("cpu", "meta"):
        assert Net.load_from_checkpoint(saved, map_location=where).device.type == where


def test_another_models_checkpoint_is_refused_and_the_difference_named(
    saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        Net.load_from_checkpoint(saved, width=7)
    assert str(caught.value) == (
        f"'{saved}': the checkpoint belongs to another model: these have another shape: "
        "net.0.weight (5, 3) (the model has (7, 3)), net.0.bias (5,) (the model has (7,)), "
        "net.1.weight (5,) (the model has (7,)), net.1.bias (5,) (the model has (7,)), "
        "net.1.running_mean (5,) (the model has (7,)) and 2 more. Build the model that it was "
        "saved from"
        "\nFor an explanation: stratagem errors checkpoint-mismatch"
    )

    class Renamed(Net):
        def __init__(self, width: int = 6) -> None:
            super().__init__(width)
            self.head = self.net[3]
            del self.net[3]

    for load in (
        lambda: Renamed.load_from_checkpoint(saved),
        lambda: trainer_in(tmp_path).fit(Renamed(5), loader(), ckpt_path=saved),
        lambda: trainer_in(tmp_path).validate(Renamed(5), loader(), ckpt_path=saved),
    ):
        with pytest.raises(CheckpointMismatchError) as caught:
            load()
        assert str(caught.value).startswith(
            f"'{saved}': the checkpoint belongs to another model: it lacks head.weight, "
            "head.bias; it has net.3.weight, net.3.bias, which the model lacks. Build the model "
            "that it was saved from, or skip names: strict=False, or strict_loading = False in a "
            "Module\n"
        )
    partly = Renamed.load_from_checkpoint(saved, strict=False)
    state = SingleFileCheckpointIO().load_checkpoint(saved)["state_dict"]
    assert torch.equal(partly.net[0].weight, state["net.0.weight"])  # type: ignore[arg-type]


def test_a_model_may_say_that_names_need_not_match(saved: Path, tmp_path: Path) -> None:
    class Wider(Net):
        strict_loading = False

        def __init__(self, width: int = 5) -> None:
            super().__init__(width)
            self.unknown = torch.nn.Linear(1, 1)

    state = SingleFileCheckpointIO().load_checkpoint(saved)["state_dict"]
    loaded, validated = Wider.load_from_checkpoint(saved), Wider()
    trainer_in(tmp_path).validate(validated, loader(), ckpt_path=saved, verbose=False)
    for model in (loaded, validated):
        assert torch.equal(model.net[0].weight, state["net.0.weight"])  # type: ignore[arg-type]
    with pytest.raises(CheckpointMismatchError, match=r"it lacks unknown\.weight"):
        Wider.load_from_checkpoint(saved, strict=True)


def test_other_optimizers_or_schedulers_are_refused(saved: Path, tmp_path: Path) -> None:
    class Alone(Net):
        def configure_optimizers(self) -> Any:
            return Adam(self.parameters(), lr=0.1)

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [Adam(self.net[0].parameters()), Adam(self.net[3].parameters())]

    class Grouped(Net):
        def configure_optimizers(self) -> Any:
            optimizer = Adam(
                [{"params": self.net[0].parameters()}, {"params": self.net[1].parameters()}]
            )
            return [optimizer], [StepLR(optimizer, 1), StepLR(optimizer, 1)]

    def resume(model: Module) -> str:
        with pytest.raises(CheckpointMismatchError) as caught:
            trainer_in(tmp_path, max_epochs=2).fit(model, loader(), ckpt_path=saved)
        return str(caught.value)

    assert resume(Two(5)) == (
        f"'{saved}' was saved with 1 optimizers, but configure_optimizers() returns 2: return what "
        "it was saved with"
    )
    assert resume(Alone(5)) == (
        f"'{saved}' was saved with 2 schedulers, but configure_optimizers() returns 0: return what "
        "it was saved with"
    )
    assert resume(Grouped(5)) == (
        f"'{saved}': the checkpoint's optimizer has no parameter group of net.0.weight, "
        "net.0.bias; its groups are net.0.weight, net.0.bias, net.1.weight, net.1.bias, "
        "net.3.weight and 1 more: use the optimizer and the parameter groups that it was saved with"
        "\nFor an explanation: stratagem errors checkpoint-mismatch"
    )


LEFT_OUT = (
    "'{}': the checkpoint's optimizer has parameter groups that this one lacks: net.1.weight, "
    "net.1.bias; net.3.weight, net.3.bias. Their state would be lost: use the groups that it was "
    "saved with (requires_grad_(False) lets one stay and not train), or load the weights alone and "
    "begin with a new optimizer\nFor an explanation: stratagem errors checkpoint-mismatch"
)


def test_an_optimizer_with_fewer_groups_than_were_saved_is_refused(
    run_script: Callable[..., Any],
) -> None:
    # In a process of its own: a strategy's process group lasts as long as the process.
    strategies = ("single_device", "ddp", "ddp_sharded", "fsdp")
    script = Path(__file__).parents[1] / "scripts" / "fewer_groups.py"
    finished = run_script(script.read_text(), *strategies)
    said = json.loads(finished.stdout.splitlines()[-1])
    assert tuple(said) == strategies
    for path, without_two, without_first_two, warned in said.values():
        assert without_two == LEFT_OUT.format(path)
        assert "lacks: net.0.weight, net.0.bias; net.1.weight, net.1.bias. " in without_first_two
        expected = "groups stand in another order than in the checkpoint"
        assert any(expected in text for text in warned), warned


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_the_state_of_another_optimizer_is_refused_and_the_options_named() -> None:
    net = nn.Linear(2, 2)
    of_adam = named_state(stepped(net, AdamW(net.parameters())), net)
    for other in (SGD, RMSprop, Adagrad):
        with pytest.raises(CheckpointMismatchError, match=f"lacks .*: {other.__name__} has "):
            load_named_state(other(net.parameters(), lr=0.1), net, of_adam)
    group = of_adam["param_groups"][0]
    of_adam["param_groups"] = [{name: group[name] for name in ("params", "lr", "betas", "eps")}]
    with pytest.raises(CheckpointMismatchError) as caught:
        load_named_state(SGD(net.parameters(), lr=0.1), net, of_adam)
    assert str(caught.value) == (
        "the checkpoint's optimizer has the group options betas, eps, lr, and lacks dampening, "
        "momentum, nesterov, weight_decay: SGD has dampening, differentiable, foreach, fused, lr, "
        "maximize, momentum, nesterov, weight_decay. Use the optimizer that it was saved with"
    )


def test_load_named_state_keeps_missing_optimizer_options() -> None:
    net = nn.Linear(2, 2)
    saved = named_state(stepped(net, AdamW(net.parameters(), lr=0.5)), net)
    for name in ("amsgrad", "foreach", "decoupled_weight_decay"):
        del saved["param_groups"][0][name]
    optimizer = AdamW(net.parameters(), lr=0.1, amsgrad=True, foreach=True)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    load_named_state(optimizer, net, saved)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.5, 0.25)
    assert group["amsgrad"]
    assert group["foreach"]
    assert group["decoupled_weight_decay"]


class SlowWeights(SGD):
    """Draws weights to their slow copies every third step, at a rate that it counts down."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        own: dict[Any, Any] = self.state  # torch's annotation knows parameters only
        count = own.setdefault("global", {"steps": torch.zeros(())})
        count["steps"] += 1
        self.param_groups[0]["lr"] = 0.05 / (1 + count["steps"].item())
        if self.steps % 3 == 0:
            with torch.no_grad():
                for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.slow, self.steps = state.pop("slow"), state.pop("steps")
        super().load_state_dict(state)


class OfSlowWeights(Net):
    def configure_optimizers(self) -> Any:
        return SlowWeights(self.parameters())


@pytest.mark.parametrize("folder", [False, True])
def test_the_state_of_an_optimizer_that_belongs_to_no_parameter_is_resumed(
    folder: bool, tmp_path: Path
) -> None:
    trainers = []
    for name, steps, path in (("whole", 7, None), ("half", 4, None), ("more", 7, "half.ckpt")):
        plugins = [DirectoryCheckpointIO()] if folder else []
        trainer = trainer_in(tmp_path / name, max_steps=steps, plugins=plugins)
        trainer.fit(OfSlowWeights(), loader(), ckpt_path=tmp_path / path if path else None)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        trainers.append(trainer)
    whole, _, resumed = trainers
    assert_same_state(resumed, whole)
    of_whole, of_resumed = (one.optimizers[0].state_dict() for one in (whole, resumed))
    assert of_resumed["steps"] == 7
    assert of_resumed["state"]["global"]["steps"] == 7
    for slow, wanted in zip(of_resumed["slow"], of_whole["slow"], strict=True):
        assert torch.equal(slow, wanted)


def test_lite_saves_the_state_of_an_optimizer_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu", devices=1)
    kept = []
    for is_saved in (True, False):
        net = nn.Linear(2, 2)
        model, optimizer = lite.setup(net, SlowWeights(net.parameters()))
        if is_saved:
            lite.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            lite.save(tmp_path / "one.ckpt", {"model": model, "optimizer": optimizer})
        lite.load(tmp_path / "one.ckpt", {"model": model, "optimizer": optimizer})
        kept.append(optimizer.optimizer.state_dict())
    assert kept[1]["steps"] == 1
    assert str(kept[1]) == str(kept[0])


@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded", "model_parallel"])
def test_state_that_belongs_to_no_parameter_is_refused_by_name_where_state_is_divided(
    strategy: str, run_script: Callable[..., Any], tmp_path: Path
) -> None:
    run_script(
        f"""
import pytest, torch
from torch import nn
from stratagem import Lite
from stratagem.errors import CheckpointMismatchError

class Counts(torch.optim.SGD):
    def step(self, closure=None):
        self.state["global"] = {{"steps": 1}}
        return super().step(closure)

class SlowStart(Counts):
    def state_dict(self):
        return {{**super().state_dict(), "k": 3}}

lite = Lite(accelerator="cpu", devices=1, strategy={strategy!r})
whole = Lite(accelerator="cpu", devices=1)
for kind, names in ((Counts, "global"), (SlowStart, "k, global")):
    expected = f"the optimizer {{kind.__name__}} has the state {{names}}, which belongs to no par"
    state = {{}}
    for one in (whole, lite):
        net = nn.Linear(2, 2)
        model, optimizer = one.setup(net, kind(net.parameters(), lr=0.1))
        state[one] = {{"model": model, "optimizer": optimizer}}
        one.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    whole.save("whole.ckpt", state[whole])
    with pytest.raises(CheckpointMismatchError, match=expected):
        lite.load("whole.ckpt", state[lite])
    with pytest.raises(CheckpointMismatchError, match=f"{{kind.__name__}} has the state (k|glo)"):
        lite.save("own.ckpt", state[lite])
"""
    )


def test_state_that_belongs_to_no_parameter_and_is_no_safe_data_is_refused_at_the_save() -> None:
    net = nn.Linear(2, 2)
    optimizer = SlowWeights(net.parameters())
    optimizer.state["global"] = {"seen": range(3)}  # type: ignore[index]  # parameters only
    expected = r"the state of the optimizer SlowWeights: .*'global'\]\['seen'\] is of type .*range"
    with pytest.raises(CheckpointContentError, match=expected):
        named_state(optimizer, net)


def test_named_state_keeps_entries_without_a_parameter() -> None:
    net = nn.Linear(2, 2)
    optimizer = stepped(net, SlowWeights(net.parameters()))
    fresh = SlowWeights(net.parameters())
    load_named_state(fresh, net, with_names(fresh, net, optimizer.state_dict()))
    assert fresh.steps == 1
    assert dict[Any, Any](fresh.state)["global"] == {"steps": 1}


def test_an_optimizer_of_other_parameters_cannot_be_saved_by_name(tmp_path: Path) -> None:
    net, stranger = nn.Linear(2, 2), nn.Linear(2, 2)
    lite = Lite(accelerator="cpu")
    lite.launch()
    _, optimizer = lite.setup(net, Adam([*net.parameters(), *stranger.parameters()]))
    with pytest.raises(CheckpointMismatchError) as caught:
        lite.save(tmp_path / "lite.ckpt", {"optimizer": optimizer})
    assert str(caught.value) == (
        "the optimizer holds 2 parameter(s) that the model does not have, so its state cannot be "
        "saved by name: build it from model.parameters() of the model that you hand over"
    )


def test_a_newer_format_is_refused(saved: Path, tmp_path: Path) -> None:
    io = SingleFileCheckpointIO()
    checkpoint = {**io.load_checkpoint(saved), "format_version": 99, "stratagem_version": "9.9"}
    io.save_checkpoint(checkpoint, tmp_path / "new.ckpt")
    for load in (
        lambda: trainer_in(tmp_path).fit(Net(5), loader(), ckpt_path=tmp_path / "new.ckpt"),
        lambda: Net.load_from_checkpoint(tmp_path / "new.ckpt"),
    ):
        with pytest.raises(CheckpointCorruptError) as caught:
            load()
        from stratagem import __version__

        assert str(caught.value) == (
            f"'{tmp_path / 'new.ckpt'}' has format version 99, made by stratagem 9.9; this is "
            f"stratagem {__version__}, which reads version 2: upgrade stratagem-core"
        )


def test_a_checkpoint_of_lite_is_not_taken_for_a_trainers(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    lite.save(tmp_path / "lite.ckpt", {"model": {}, "step": 3})
    for load in (
        lambda: trainer_in(tmp_path).fit(Net(), loader(), ckpt_path=tmp_path / "lite.ckpt"),
        lambda: Net.load_from_checkpoint(tmp_path / "lite.ckpt"),
    ):
        with pytest.raises(CheckpointMismatchError) as caught:
            load()
        assert str(caught.value) == (
            f"'{tmp_path / 'lite.ckpt'}' has no 'state_dict'; it has model, step: expected a "
            "checkpoint that a Trainer saved (one of Lite's is loaded with Lite.load)"
        )


def test_removed_checkpoint_folder_raises(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    class Loses(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.touch()

    trainer = trainer_in(tmp_path, callbacks=[Loses(), ModelCheckpoint(folder)])
    with pytest.raises(CheckpointSaveError, match=r"cannot save in '.*saved': \w+Error"):
        trainer.fit(Net(), loader())
    no_folder = ModelCheckpoint(tmp_path / ("a" * 300))
    with pytest.raises(CheckpointNotFoundError, match=r"aaa cannot be searched: OSError"):
        trainer_in(tmp_path, callbacks=no_folder).validate(Net(), loader(), ckpt_path="last")


def test_missing_ckpt_path_raises_checkpoint_not_found(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1, callbacks=ModelCheckpoint(tmp_path / "none"))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint 'no\.ckpt'"):
        trainer.fit(Net(), loader(), ckpt_path="no.ckpt")
    for asked in ("best", "last"):
        with pytest.raises(CheckpointNotFoundError) as caught:
            trainer.fit(Net(), loader(), ckpt_path=asked)
        assert str(caught.value) == (
            f"ckpt_path={asked!r}: this Trainer has saved no checkpoint yet in "
            f"{tmp_path / 'none'}: fit first, or pass a path"
        )
    for version in (0, 1):  # the second fit saves in a folder of its own
        trainer_in(tmp_path, logger=True, max_epochs=1).fit(Net(), loader())
        saved = next(tmp_path.glob(f"stratagem_logs/version_{version}/checkpoints/*.ckpt"))
    with pytest.raises(CheckpointNotFoundError) as caught:
        trainer_in(tmp_path, logger=True).fit(Net(), loader(), ckpt_path="last")
    assert str(caught.value) == (
        "ckpt_path='last': this Trainer has saved no checkpoint yet in "
        f"{tmp_path / 'stratagem_logs/version_2/checkpoints'}: the newest one of an earlier run is "
        f"ckpt_path={str(saved)!r}. A new run saves in a new folder, unless ModelCheckpoint is "
        "given dirpath="
    )
    # Without a logger, the folder beside it is that of another project.
    with pytest.raises(CheckpointNotFoundError) as caught:
        trainer_in(tmp_path / "stratagem_logs/new").fit(Net(), loader(), ckpt_path="last")
    assert str(caught.value).endswith("new/checkpoints: fit first, or pass a path")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint yet: fit first, or pass a"):
        trainer_in(tmp_path).validate(Net(), loader(), ckpt_path="best")
    without = trainer_in(tmp_path, enable_checkpointing=False)
    with pytest.raises(CheckpointNotFoundError) as caught:
        without.fit(Net(), loader(), ckpt_path="best")
    assert str(caught.value) == (
        "ckpt_path='best' needs a ModelCheckpoint among the callbacks; there is none: pass a path"
    )


class WithLayer(Net):
    """A hyperparameter that no checkpoint can hold, beside one that it can."""

    def __init__(self, layer: Any, rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_unsavable_hyperparameters_warn_and_are_required_on_load(
    tmp_path: Path,
) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match=r"checkpoints leave out the hyperparameter\(s\) layer"):
        trainer.fit(WithLayer(object(), rate=0.25), loader())
    path = tmp_path / "own.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointMismatchError, match="holds no value of layer, which WithLayer"):
        WithLayer.load_from_checkpoint(path)
    again = WithLayer.load_from_checkpoint(path, layer=1)
    assert (again.hparams.layer, again.hparams.rate) == (1, 0.25)


def test_a_namespace_of_hyperparameters_is_kept_and_a_strange_name_refused() -> None:
    class FromCommandLine(Net):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self.save_hyperparameters(options)

    kept = FromCommandLine(Namespace(rate=0.1, depth=3)).hparams
    assert (kept.rate, kept.depth) == (0.1, 3)
    with pytest.raises(UserCodeError, match=r"'speed' is no argument of FromCommandLine"):
        FromCommandLine("speed")


def test_states_of_callbacks_must_be_safe_data(tmp_path: Path) -> None:
    class OddState(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": object()}

    with pytest.raises(CheckpointContentError, match=r"the state of the callback .*OddState"):
        trainer_in(tmp_path, max_epochs=1, callbacks=OddState()).fit(Net(), loader())


def test_saving_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        trainer_in(tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    assert str(caught.value) == (
        "this needs a model that was fitted, validated, tested or predicted with this Trainer; "
        "there was none yet"
    )


# ---------------------------------------------------------------- the callbacks' arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "best"}, "ModelCheckpoint(mode='best'): expected 'min' or 'max'"),
        (
            {"save_top_k": -2},
            "ModelCheckpoint(save_top_k=-2): expected a number of checkpoints, or -1 for all",
        ),
        ({"keep_latest_k": -1}, "ModelCheckpoint(keep_latest_k=-1): expected at least 0"),
        ({"every_n_epochs": -1}, "ModelCheckpoint(every_n_epochs=-1): expected at least 0"),
        (
            {"every_n_train_steps": -1},
            "ModelCheckpoint(every_n_train_steps=-1): expected at least 0",
        ),
    ],
)
def test_model_checkpoint_refuses_arguments_that_make_no_sense(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelCheckpoint(**arguments)
    assert str(caught.value) == text


def test_a_value_that_is_monitored_must_be_logged(tmp_path: Path) -> None:
    for callback, name in (
        (ModelCheckpoint(tmp_path, monitor="val_lss"), "ModelCheckpoint"),
        (EarlyStopping("val_lss"), "EarlyStopping"),
    ):
        with pytest.raises(UserCodeError) as caught:
            trainer_in(tmp_path, max_epochs=1, callbacks=callback).fit(Net(), loader(), loader(8))
        assert str(caught.value) == (
            f"{name}(monitor='val_lss'): no value of that name was logged; there is train_loss, "
            "train_loss_epoch, train_loss_step, val_loss. Did you mean 'val_loss'? Log it in the "
            "Module with self.log('val_lss', ...)"
        )


def test_monitor_without_a_validation_loader_names_the_loader(tmp_path: Path) -> None:
    lost = {
        "val_loss": "Net has validation_step, but there is no loader for validation: pass "
        "val_dataloaders to fit()",
        "train_los": "Did you mean 'train_loss'? Log it in the Module with "
        "self.log('train_los', ...)",
    }
    for name, remedy in lost.items():
        trainer = trainer_in(
            tmp_path, max_epochs=1, callbacks=ModelCheckpoint(tmp_path, monitor=name)
        )
        with pytest.raises(UserCodeError) as caught:
            trainer.fit(Net(), loader())
        assert str(caught.value) == (
            f"ModelCheckpoint(monitor={name!r}): no value of that name was logged; there is "
            f"train_loss, train_loss_epoch, train_loss_step. {remedy}"
        )


def test_a_file_name_takes_values_that_are_there(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch:02d}-{acc:.2f}")
    with pytest.raises(ConfigurationError) as caught:
        trainer_in(tmp_path, max_epochs=1, callbacks=saver).fit(Net(), loader())
    assert str(caught.value) == (
        "ModelCheckpoint(filename='{epoch:02d}-{acc:.2f}') uses 'acc', but there is only epoch, "
        "step, train_loss, train_loss_epoch, train_loss_step"
    )


# ---------------------------------------------------------------- EarlyStopping


@pytest.mark.parametrize(
    ("scores", "arguments", "epochs"),
    [
        ((1.0, 0.9, 0.95, 0.92, 0.91, 0.1), {"patience": 3}, 5),
        ((1.0, 0.9, 0.95, 0.92, 0.91, 0.1), {"patience": 1}, 3),
        ((1.0, 0.9, 0.8, 0.7, 0.6, 0.5), {"patience": 1}, 6),
        ((1.0, 0.99, 0.98, 0.97, 0.5, 0.5), {"patience": 2, "min_delta": 0.1}, 3),
        ((1.0, 2.0, 1.5, 1.7, 3.0, 3.0), {"patience": 2, "mode": "max"}, 4),
        ((NAN, NAN, NAN, 1.0, 1.0, 1.0), {"patience": 2, "check_finite": False}, 2),
        ((1.0, 0.9, 0.2, 0.1, 0.0, 0.0), {"stopping_threshold": 0.5}, 3),
        ((1.0, 1.1, 0.9, 6.0, 0.0, 0.0), {"divergence_threshold": 5.0}, 4),
        ((0.1, 0.2, 0.9, 1.0, 1.0, 1.0), {"stopping_threshold": 0.8, "mode": "max"}, 3),
        ((0.5, 0.4, 0.1, 0.0, 0.0, 0.0), {"divergence_threshold": 0.2, "mode": "max"}, 3),
        ((1.0, 2.0, 2.0, 2.0, 2.0, 2.0), {"patience": 2, "check_on_train_epoch_end": True}, 3),
        ((1.0, 2.0, 2.0, 2.0, 2.0, 2.0), {"patience": 2, "check_on_train_epoch_end": False}, 3),
    ],
)
def test_early_stopping_ends_training_when_a_value_stops_improving(
    scores: tuple[float, ...], arguments: dict[str, Any], epochs: int, tmp_path: Path
) -> None:
    stopping = EarlyStopping("score", **arguments)
    trainer = trainer_in(tmp_path, max_epochs=6, limit_train_batches=1, callbacks=stopping)
    trainer.fit(Scored(scores), loader(), loader(4))
    assert trainer.current_epoch == epochs
    assert stopping.stopped_epoch == (epochs - 1 if epochs < 6 else 0)


@pytest.mark.parametrize("score", [NAN, float("inf"), -float("inf")])
def test_early_stopping_ends_training_when_a_value_is_not_finite(
    score: float, tmp_path: Path
) -> None:
    stopping = EarlyStopping("score", patience=5)
    trainer = trainer_in(tmp_path, max_epochs=6, limit_train_batches=1, callbacks=stopping)
    text = f"EarlyStopping ends training after step 2: score is {score}. check_finite=False goes on"
    with pytest.warns(UserWarning, match=re.escape(text)):
        trainer.fit(Scored((1.0, score, 0.5, 0.5, 0.5, 0.5)), loader(), loader(4))
    assert (trainer.current_epoch, stopping.stopped_epoch) == (2, 1)


def test_early_stopping_prints_improvements_and_skips_missing_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = EarlyStopping("score", 0.0, 2, True)
    missing = EarlyStopping("scroe", strict=False)
    arguments: dict[str, Any] = {"limit_train_batches": 1, "callbacks": [there, missing]}
    trainer = trainer_in(tmp_path, max_epochs=6, **arguments)
    trainer.fit(Scored((1.0, 0.5, 0.6, 0.7, 0.1, 0.1)), loader(), loader(4))
    assert trainer.current_epoch == 4
    assert capsys.readouterr().out.splitlines() == [
        "stratagem: EarlyStopping: score is 1",
        "stratagem: EarlyStopping: score improved from 1 to 0.5",
    ]
    assert there.stopping_reason == "EarlyStopping: score did not improve on 0.5 (patience=2)"
    assert missing.stopping_reason == ""


@pytest.mark.parametrize(
    ("scores", "arguments", "larger"),
    [
        ((1.0, 2.0, 2.0, 2.0, 2.0, 0.5), {"patience": 2}, {"patience": 4}),
        ((1.0, 0.2, 0.1), {"stopping_threshold": 0.5}, {"stopping_threshold": 0.15}),
        ((1.0, 6.0, 9.0), {"divergence_threshold": 5.0}, {"divergence_threshold": 8.0}),
        ((1.0, NAN, NAN), {"patience": 2}, {"patience": 2, "check_finite": False}),
    ],
)
def test_resume_after_early_stopping_trains_no_step(
    scores: tuple[float, ...],
    arguments: dict[str, Any],
    larger: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: dict[str, Any], ckpt_path: str | None) -> tuple[Trainer, EarlyStopping]:
        stopping = EarlyStopping("score", **arguments)
        saver = ModelCheckpoint(tmp_path, save_last=True)
        trainer = trainer_in(
            tmp_path, max_epochs=9, limit_train_batches=1, callbacks=[stopping, saver]
        )
        trainer.fit(Scored((*scores, *[9.0] * 9)), loader(), loader(4), ckpt_path=ckpt_path)
        return trainer, stopping

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "EarlyStopping ends training")
        trainer, first = run(arguments, None)
        ended = trainer.current_epoch
        for _ in range(2):
            capsys.readouterr()
            again, stopping = run(arguments, "last")
            assert (again.current_epoch, again.global_step) == (ended, trainer.global_step)
            assert stopping.state_dict() == pytest.approx(first.state_dict(), nan_ok=True)
            assert stopping.stopped_by == first.stopped_by
            out = capsys.readouterr().out
            assert out == (
                f"stratagem: {first.stopping_reason}. This ended the resumed run, and ends this "
                "one: to train on, change the arguments\n"
            )
        further, stopping = run(larger, "last")
    assert further.current_epoch > ended
    assert "resumed run" not in capsys.readouterr().out


RECOVERS = (1.0, 1.1, 1.2, 0.9, 0.8, 0.7, 0.6, 0.5)
"""A value that exhausts a patience of 2 in epoch 2, and recovers in epoch 3."""


@pytest.mark.parametrize("minimum", [{"min_epochs": 5}, {"min_steps": 5}])
def test_a_value_that_recovers_before_the_minimum_of_training_trains_on(
    minimum: dict[str, int], tmp_path: Path
) -> None:
    def run(ckpt_path: str | None, scores: tuple[float, ...] = RECOVERS) -> Trainer:
        stopping = EarlyStopping("score", patience=2)
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        arguments: dict[str, Any] = {"callbacks": [stopping, saver], **minimum}
        trainer = trainer_in(tmp_path, max_epochs=8, limit_train_batches=1, **arguments)
        trainer.fit(Scored(scores), loader(), loader(4), ckpt_path=ckpt_path)
        # At the end the callback has no reason, or the reason of the last check.
        assert (stopping.stopped_by != "") is trainer.should_stop
        return trainer

    trainer = run(None)
    assert (trainer.current_epoch, trainer.should_stop) == (8, False)
    for epoch in range(8):
        assert run(str(tmp_path / f"epoch={epoch}.ckpt")).current_epoch == 8
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    assert run(None, (1.0, 1.1, *[1.2] * 6)).current_epoch == 5
    assert run(str(tmp_path / "epoch=3.ckpt"), (1.0, 1.1, *[1.2] * 6)).current_epoch == 5


def test_early_stopping_takes_back_no_stop_but_its_own(tmp_path: Path) -> None:
    class StopIn(Callback):
        def on_validation_end(self, trainer: Trainer, module: Module) -> None:
            if trainer.current_epoch == 2 and not trainer.sanity_checking:
                trainer.should_stop = True

    def epochs(*callbacks: Callback) -> int:
        arguments: dict[str, Any] = {"min_epochs": 5, "callbacks": list(callbacks)}
        trainer = trainer_in(tmp_path, max_epochs=8, limit_train_batches=1, **arguments)
        trainer.fit(Scored(RECOVERS), loader(), loader(4))
        return trainer.current_epoch

    recovers, reached = EarlyStopping("score", patience=2), EarlyStopping("score", mode="max")
    reached.stopping_threshold = 0.4
    assert epochs(recovers, StopIn()) == 5
    assert epochs(StopIn(), recovers) == 5
    assert epochs(recovers, reached) == 5
    assert (recovers.stopped_by, reached.stopped_by) == ("", "stopping_threshold")


def test_early_stopping_begins_anew_in_a_second_fit(tmp_path: Path) -> None:
    stopping = EarlyStopping("score", patience=2)
    trainer = trainer_in(tmp_path, max_epochs=6, limit_train_batches=1, callbacks=stopping)
    for scores in ((1.0, 0.5, 0.6, 0.7), (4.0, 3.0, 3.5, 3.6), (2.0, 2.5, 2.6)):
        trainer.fit(Scored((*scores, *[9.0] * 3)), loader(), loader(4))
        assert trainer.current_epoch == len(scores)
        assert (stopping.wait_count, stopping.best_score) == (2, min(scores))
        assert stopping.stopped_epoch == len(scores) - 1
    trainer.validate(Scored((9.0,) * 6), loader(4), verbose=False)
    assert (stopping.wait_count, stopping.best_score) == (2, 2.0)


def test_the_checkpoints_of_an_earlier_fit_are_another_runs(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last=True)
    trainer = trainer_in(tmp_path, max_epochs=2, limit_train_batches=1, callbacks=saver)
    best = []
    for scores in ((1.0, 0.5), (4.0, 3.0), (0.25, 0.125)):
        trainer.fit(Scored(scores), loader(), loader(4))
        assert saver.best_model_score == saver.current_score == scores[1]
        best.append(Path(saver.best_model_path).name)
    names = ["epoch=1.ckpt", "epoch=1-v1.ckpt", "epoch=1-v2.ckpt"]
    assert best == names
    lasts = ["last.ckpt", "last-v1.ckpt", "last-v2.ckpt"]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted([*names, *lasts])
    # After the fit "best" is the last fit's; a fit that resumes goes on with its files.
    trainer.validate(Scored((9.0,) * 6), loader(4), ckpt_path="best", verbose=False)
    assert Path(saver.best_model_path).name == "epoch=1-v2.ckpt"
    trainer.options = replace(trainer.options, max_epochs=3)
    trainer.fit(Scored((0.25, 0.125, 0.0)), loader(), loader(4), ckpt_path="last")
    assert Path(saver.best_model_path).name == "epoch=2.ckpt"
    left = ["epoch=1.ckpt", "epoch=1-v1.ckpt", "epoch=2.ckpt"]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted([*left, *lasts])


def test_early_stopping_counts_on_across_a_resume(tmp_path: Path) -> None:
    scores = (1.0, 2.0, 2.0, 2.0, 2.0)

    def run(**arguments: Any) -> Trainer:
        stopping = EarlyStopping("score", patience=3)
        return trainer_in(tmp_path, limit_train_batches=1, callbacks=[stopping], **arguments)

    first = run(max_epochs=2)
    first.fit(Scored(scores), loader(), loader(4))
    assert first.checkpoint_callback is not None
    second = run(max_epochs=5)
    second.fit(
        Scored(scores), loader(), loader(4), ckpt_path=first.checkpoint_callback.best_model_path
    )
    assert second.current_epoch == 4


def test_early_stopping_refuses_an_unknown_mode() -> None:
    with pytest.raises(ConfigurationError) as caught:
        EarlyStopping("loss", mode="best")  # type: ignore[arg-type]
    assert str(caught.value) == "EarlyStopping(mode='best'): expected 'min' or 'max'"
    with pytest.raises(ConfigurationError) as caught:
        EarlyStopping("loss", min_delta=float("nan"))
    assert str(caught.value) == (
        "EarlyStopping(min_delta=nan): expected a number; no change would count"
    )


def test_callbacks_that_would_share_a_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        trainer_in(tmp_path, callbacks=[EarlyStopping("loss"), EarlyStopping("loss")])
    assert str(caught.value) == (
        "several EarlyStopping have the state_key 'EarlyStopping(loss, min)': their states would "
        "overwrite one another: give them different arguments or state_keys"
    )
