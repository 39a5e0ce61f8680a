"""Callbacks: their hooks fit the Trainer's calls, and a resumed run continues with their state."""

from __future__ import annotations

import contextlib
import inspect
import io
from difflib import get_close_matches
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from stratagem.callbacks import Callback
from stratagem.data import map_tensors
from stratagem.state import find_offending_value
from stratagem.strategies import check_overrides
from stratagem.trainer import Trainer
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.strategies.models import Learner, loader
from stratagem_testing.surroundings import Surroundings

KIND = "callback"


def _trainer(bench: Bench, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=bench.folder.parent / "root",
        **{"strategy": "single_device", "devices": 1, "max_epochs": 2, "logger": True, **options},
    )


def _fit(bench: Bench, *callbacks: Callback, path: Any = None, **options: Any) -> Learner:
    torch.manual_seed(0)
    model = Learner()
    trainer = _trainer(bench, *callbacks, **options)
    trainer.fit(model, loader(32, 1), loader(16, 1), ckpt_path=path)
    return model


def _weights(model: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.net.state_dict().items()}


def _differing(one: Learner, other: Learner) -> list[str]:
    """Return the names of the weights in which two models differ."""
    weights, others = _weights(one), _weights(other)
    return [name for name, value in weights.items() if not torch.equal(value, others[name])]


@check(KIND, "life/made")
def _made(bench: Bench) -> None:
    """It is a Callback. Its constructor writes no file and starts no thread."""
    before = Surroundings.now()
    callback = bench.make()
    assert isinstance(callback, Callback), (
        f"{bench.component.name} made {callback!r}: subclass stratagem.callbacks.Callback"
    )
    assert not bench.files(), (
        f"making a callback wrote {', '.join(bench.files())}: every rank makes one; write in "
        "`setup` or later, on rank 0"
    )
    changed = before.changes()
    assert not changed, f"after making a callback there is {'; '.join(changed)}"


@check(KIND, "life/hooks")
def _hooks(bench: Bench) -> None:
    """Each hook accepts the arguments that the Trainer passes. No name of a hook is misspelled."""
    kind = type(bench.make())
    error = bench.error(lambda: check_overrides(kind, Callback))
    assert error is None, str(error)
    known = [name for name, value in vars(Callback).items() if isinstance(value, FunctionType)]
    for name, value in inspect.getmembers(kind, inspect.isfunction):
        if name in known or name.startswith("_") or value.__module__.startswith("stratagem."):
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.88)
        assert not near, (
            f"{kind.__name__}.{name} is no hook, and nothing calls it: did you mean {near[0]}?"
        )


@check(KIND, "runs/every stage")
def _stages(bench: Bench) -> None:
    """One callback works in fit, validate and test, and leaves nothing running."""
    callback = bench.make()
    torch.manual_seed(0)
    model, trainer = Learner(), _trainer(bench, callback)
    trainer.fit(model, loader(32, 1), loader(16, 1))  # what torch starts at first use is there
    before = Surroundings.now()
    trainer = _trainer(bench, bench.make())
    trainer.fit(model, loader(32, 1), loader(16, 1))
    trainer.validate(model, loader(16, 1), verbose=False)
    trainer.test(model, loader(16, 1), verbose=False)
    changed = before.changes()
    assert not changed, f"after three runs there is {'; '.join(changed)}: end it in `teardown`"


@check(KIND, "runs/same training")
def _same(bench: Bench) -> None:
    """A run has the same weights as without the callback, unless changes_training = True."""
    if bench.option("changes_training"):
        return
    different = _differing(_fit(bench, bench.make()), _fit(bench))
    assert not different, (
        f"with the callback a run ends with other weights ({different[0]}): it draws random "
        "numbers or changes the model. If it is meant to, set changes_training = True"
    )


@check(KIND, "runs/a run that fails")
def _fails(bench: Bench) -> None:
    """An error in training_step ends the run, and the callback raises no other error."""

    class Fails(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise ValueError("planted by the conformance kit")
            return super().training_step(batch, batch_idx)

    trainer = _trainer(bench, bench.make())
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        error = bench.error(lambda: trainer.fit(Fails(), loader(32, 1)))
    assert isinstance(error, ValueError), (
        f"a training step raised ValueError, and the run ended in {brief(error)}"
    )
    assert "planted" in str(error), f"a training step failed, and the run ended in {brief(error)}"
    # The Trainer prints the errors of hooks that it calls after an error.
    _, _, second = printed.getvalue().partition("stratagem: ")
    assert not second, f"after an error in a training step the callback failed with {second}"


@check(KIND, "state/plain")
def _plain(bench: Bench) -> None:
    """After a run, its state loads with weights_only=True, under a unique name."""
    callback = bench.make()
    _fit(bench, callback)
    key = callback.state_key
    assert isinstance(key, str), f"state_key is {key!r}; expected a str"
    assert key, "state_key is empty; expected a name that is unique in a run"
    assert key == bench.make().state_key, (
        f"state_key is {key!r}, and {bench.make().state_key!r} of a second callback: a resumed run "
        "finds no state under another name"
    )
    offending = find_offending_value(callback.state_dict())
    assert not offending, (
        f"its state_dict() has {offending}: a checkpoint takes weights-only-safe data"
    )


@check(KIND, "state/resumed")
def _resumed(bench: Bench) -> None:
    """A run that resumes after an epoch has the same weights as an uninterrupted run.

    At the end, state_dict() of the callback returns the same.
    """
    uninterrupted, continued = bench.make(), bench.make()
    whole = _fit(bench, uninterrupted, max_epochs=2)
    path = bench.folder.parent / "after_one.ckpt"
    torch.manual_seed(0)
    trainer = _trainer(bench, bench.make(), _Saves(path), max_epochs=2)
    trainer.fit(Learner(), loader(32, 1), loader(16, 1))
    resumed = _fit(bench, continued, path=path, max_epochs=2)
    different = _differing(whole, resumed)
    assert not different, (
        f"a resumed run ends with other weights ({different[0]}): state_dict() has to hold, and "
        "load_state_dict() to restore, what the callback goes on from"
    )
    expected, found = uninterrupted.state_dict(), continued.state_dict()
    wrong = [key for key in {**expected, **found} if _differ(expected, found, key)]
    if wrong:
        # What two uninterrupted runs have differently, such as seconds, cannot be compared.
        other = bench.make()
        _fit(bench, other, max_epochs=2)
        wrong = [key for key in wrong if not _differ(expected, other.state_dict(), key)]
    assert not wrong, (
        f"after a resumed run state_dict() has {wrong[0]!r}: {found.get(wrong[0])!r}, expected "
        f"{expected.get(wrong[0])!r}, as after an uninterrupted run. load_state_dict() is called "
        "before `on_train_start`, which must not reset what was loaded: reset it in `setup`"
    )


def _differ(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Return whether two states differ at a key."""
    told = [map_tensors(Tensor.tolist, state.get(key)) for state in (one, other)]
    return bool(told[0] != told[1])


class _Saves(Callback):
    """Saves a checkpoint when the second epoch begins."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@check(KIND, "runs/two ranks", slow=True)
def _two_ranks(bench: Bench) -> None:
    """A run with two ranks ends normally."""
    error = bench.error(
        lambda: _fit(bench, bench.make(), strategy="ddp_fork", devices=2, max_epochs=1)
    )
    assert error is None, f"a run on two ranks ended in {brief(error)}"
