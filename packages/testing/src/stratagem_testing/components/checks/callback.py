"""Callbacks: their hooks fit the Trainer's calls, and a resumed run continues with their state."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import random
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from stratagem.callbacks import Callback
from stratagem.data import map_tensors
from stratagem.discovery import nearest_of
from stratagem.loggers import Logger
from stratagem.state import find_offending_value
from stratagem.strategies import check_overrides
from stratagem.trainer import Trainer
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.every import pickled
from stratagem_testing.strategies.models import Learner, loader
from stratagem_testing.surroundings import Surroundings

KIND = "callback"


def _trainer(bench: Bench, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=bench.folder.parent / "root",
        **{
            **{"strategy": "single_device", "devices": 1, "max_epochs": 2, "logger": True},
            **{"num_sanity_val_steps": 0, **options},
        },
    )


def _fit(
    bench: Bench,
    *callbacks: Callback,
    path: Any = None,
    learner: type[Learner] = Learner,
    effects: _Effects | None = None,
    **options: Any,
) -> Learner:
    torch.manual_seed(0)
    model = learner()
    if effects is not None:
        options["logger"] = effects
    trainer = _trainer(bench, *callbacks, **options)
    if effects is not None:
        effects.note_saves_of(trainer)
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
        near = nearest_of(name, known, cutoff=0.88)
        assert not near, (
            f"{kind.__name__}.{name} is no hook, and nothing calls it: did you mean {near}?"
        )


@check(KIND, "runs/every stage")
def _stages(bench: Bench) -> None:
    """One callback works in fit, validate, test and predict, and leaves nothing running.

    This includes a second fit, the sanity check before training, a validation without a fit, and
    a training_step that returns None.
    """
    callback = bench.make()
    torch.manual_seed(0)
    model, trainer = Learner(), _trainer(bench, callback)
    trainer.fit(model, loader(32, 1), loader(16, 1))  # torch initialises its lazy parts here
    before = Surroundings.now()
    trainer = _trainer(bench, callback, num_sanity_val_steps=2)
    trainer.fit(model, loader(32, 1), loader(16, 1))
    trainer.validate(model, loader(16, 1), verbose=False)
    trainer.test(model, loader(16, 1), verbose=False)
    trainer.predict(model, loader(16, 1))
    error = bench.error(
        lambda: _trainer(bench, bench.make()).validate(model, loader(16, 1), verbose=False)
    )
    assert error is None, f"a validation without a fit before ended in {brief(error)}"
    error = bench.error(
        lambda: _trainer(bench, bench.make()).fit(_LeavesOut(), loader(32, 1), loader(16, 1))
    )
    assert error is None, (
        f"a fit whose training_step returns None for one batch ended in {brief(error)}: "
        "on_train_batch_end gets {'loss': None} then"
    )
    changed = before.changes()
    assert not changed, f"after three runs there is {'; '.join(changed)}: end it in `teardown`"


class _Unequal(Learner):
    """Its losses are tiny on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e-6 if self.trainer.global_rank == self.rank else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = 1e-6 if self.trainer.global_rank == self.rank else 1.0
        self.log("val_loss", value, batch_size=len(batch[0]))


class _LeavesOut(Learner):
    """Takes no step by the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@check(KIND, "runs/same training")
def _same(bench: Bench) -> None:
    """A run has the same weights as without the callback, unless changes_training = True.

    The model has dropout, and draws random numbers of Python and NumPy. Values that the model logs
    are the same, too.
    """
    if bench.option("changes_training"):
        return
    (own, values), (other, expected) = (
        _values(bench, *callbacks) for callbacks in ([bench.make()], [])
    )
    different = _differing(own, other)
    assert not different, (
        f"with the callback a run ends with other weights ({different[0]}): it draws random "
        "numbers, changes the model, or its mode (eval()). If it is meant to, set "
        "changes_training = True"
    )
    wrong = [name for name in expected if values.get(name) != expected[name]]
    assert not wrong, (
        f"with the callback the logged value {wrong[0]!r} is {values.get(wrong[0])}, expected "
        f"{expected[wrong[0]]}: trainer.callback_metrics and what hooks are given are everybody's"
    )


class _Random(Learner):
    """Draws from all generators that a model may use."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numpy: Any = sys.modules.get("numpy")  # if torch has imported it
        drawn = random.random() + (numpy.random.random() if numpy else 0)
        loss = super().training_step(batch, batch_idx) * (1 + drawn)
        dropped: Tensor = self.dropout(loss * torch.ones(8))
        return dropped.mean()


def _values(bench: Bench, *callbacks: Callback) -> tuple[Learner, dict[str, float]]:
    """Return the model of a run and what it has logged."""
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    model, trainer = _Random(), _trainer(bench, *callbacks)
    trainer.fit(model, loader(32, 1), loader(16, 1))
    return model, {name: float(value) for name, value in trainer.callback_metrics.items()}


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
    """After a run, its state loads with weights_only=True, under a unique name.

    It has no tensor of the model, which later steps would change.
    """
    callback = bench.make()
    model = _fit(bench, callback)
    key = callback.state_key
    assert isinstance(key, str), f"state_key is {key!r}; expected a str"
    assert key, "state_key is empty; expected a name that is unique in a run"
    assert key == bench.make().state_key, (
        f"state_key is {key!r}, and {bench.make().state_key!r} of a second callback: a resumed run "
        "finds no state under another name"
    )
    own = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    shared: list[Tensor] = []
    map_tensors(
        lambda tensor: (
            shared.append(tensor) if tensor.untyped_storage().data_ptr() in own else None
        ),
        callback.state_dict(),
    )
    assert not shared, (
        "its state_dict() has the model's own weights, which later steps change: keep copies "
        "(tensor.detach().clone())"
    )
    offending = find_offending_value(callback.state_dict())
    assert not offending, (
        f"its state_dict() has {offending}: a checkpoint takes weights-only-safe data"
    )


@check(KIND, "state/resumed")
def _resumed(bench: Bench) -> None:
    """A run that resumes after an epoch has the same weights as an uninterrupted run.

    The callback logs the same values, and saves checkpoints after the same steps. state_dict()
    returns the same after the load and at the end, and the callback holds the same weights, such as
    an average. In a second run, the validation loss grows after
    two epochs: what decides by it ends both runs after the same step.
    """
    _resume(bench, _Saves(bench.folder.parent / "first.ckpt", 1), max_epochs=2)
    saves = _Saves(bench.folder.parent / "second.ckpt", 2)
    _resume(bench, saves, max_epochs=6, learner=_Worsens)


class _Worsens(Learner):
    """Its validation loss grows from the third epoch on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", abs(self.trainer.current_epoch - 1.0), batch_size=len(batch[0]))


def _resume(bench: Bench, saves: _Saves, **options: Any) -> None:
    uninterrupted, continued, done, again = bench.make(), bench.make(), _Effects(), _Effects()
    options = {"log_every_n_steps": 1, **options}
    whole = _fit(bench, uninterrupted, effects=done, **options)
    saves.callback = bench.make()
    _fit(bench, saves.callback, saves, **options)
    begins, ready = _Begins(continued), _Begins(continued)
    resumed = _fit(bench, begins, continued, ready, path=saves.path, effects=again, **options)
    different = _differing(whole, resumed)
    assert not different, (
        f"a resumed run ends with other weights ({different[0]}): state_dict() has to hold, and "
        "load_state_dict() to restore, what the callback goes on from"
    )
    expected, found = uninterrupted.state_dict(), continued.state_dict()
    wrong = [key for key in {**expected, **found} if _differ(expected, found, key)]
    loaded = [
        key
        for key in saves.state
        if _differ(saves.state, begins.state, key) and _differ(saves.state, ready.state, key)
    ]
    late = again.since(again.began) != done.since(again.began)
    if wrong or loaded or late:
        # Values that differ between two uninterrupted runs, such as seconds, cannot be compared.
        other, told = bench.make(), _Effects()
        _fit(bench, other, effects=told, **options)
        varies = [key for key in expected if _differ(expected, other.state_dict(), key)]
        wrong = [key for key in wrong if key not in varies]
        loaded = [key for key in loaded if key not in varies]
        same = done.names() - {name for name in done.names() if done.of(name) != told.of(name)}
        for name in sorted(same):
            own, before = (each.since(again.began, name) for each in (again, done))
            assert own == before, (
                f"after a resume the callback has {name} {own}, as pairs of step and value, "
                f"expected {before}, as of an uninterrupted run: state_dict() has to hold, and "
                "load_state_dict() to restore, what these come from"
            )
    assert not loaded, (
        f"when a resumed run begins, state_dict() has {loaded[0]!r}: {ready.state[loaded[0]]!r}, "
        f"expected {saves.state[loaded[0]]!r}, as in the checkpoint: look at load_state_dict()"
    )
    assert not wrong, (
        f"after a resumed run state_dict() has {wrong[0]!r}: {found.get(wrong[0])!r}, expected "
        f"{expected.get(wrong[0])!r}, as after an uninterrupted run. load_state_dict() is called "
        "before `on_train_start`, which must not reset what was loaded: reset it in `setup`. What "
        "it restores has the types that `__init__` makes, such as a deque with its length"
    )
    held = _held(uninterrupted, whole)
    if lost := _other_values(held, _held(continued, whole)):
        other = bench.make()
        _fit(bench, other, effects=_Effects(), **options)
        varies = _other_values(held, _held(other, whole))
        lost = [place for place in lost if place not in varies]
    assert not lost, (
        f"after a resumed run the callback holds other values at {lost[0]} than after an "
        "uninterrupted run: state_dict() has to hold what it keeps of weights, such as their "
        "average, and load_state_dict() to restore it"
    )


def _held(callback: Callback, model: Learner) -> dict[str, Tensor]:
    """Return the tensors that a callback holds and that have the shape of a weight, by place."""
    own = {
        name: value.state_dict() if isinstance(value, nn.Module) else value
        for name, value in vars(callback).items()
        if value is not model
    }
    shapes = {value.shape for value in model.parameters() if value.ndim > 1}
    return {
        keystr(place): value.detach().clone()
        for place, value in tree_leaves_with_path(own)
        if isinstance(value, Tensor) and value.shape in shapes
    }


def _other_values(held: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the places at which other values are held, or none."""
    return [
        place
        for place, value in held.items()
        if place not in other or not torch.equal(value, other[place])
    ]


def _differ(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Return whether two states differ at a key."""
    told = [map_tensors(Tensor.tolist, state.get(key)) for state in (one, other)]
    return bool(told[0] != told[1])


class _Saves(Callback):
    """Saves a checkpoint when an epoch begins, and keeps the state that it has of a callback."""

    callback: Callback

    def __init__(self, path: Any, epoch: int) -> None:
        self.path, self.epoch = path, epoch
        self.state: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)
            self.state = copy.deepcopy(self.callback.state_dict())


class _Begins(Callback):
    """Keeps the state of a callback when training begins."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.state: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return f"begins {id(self)}"

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.state = copy.deepcopy(self.callback.state_dict())


class _Effects(Logger):
    """Notes what is logged, and when checkpoints are saved, by steps."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int, Any]] = []
        self.began = 0

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        self.began = resumed_at or 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.noted += [(name, step or 0, float(value)) for name, value in metrics.items()]

    def note_saves_of(self, trainer: Trainer) -> None:
        """Note each checkpoint that is saved by `trainer.save_checkpoint`."""
        save = trainer.save_checkpoint

        def noted(*arguments: Any, **options: Any) -> None:
            self.noted.append(("saved a checkpoint", trainer.global_step, 0.0))
            save(*arguments, **options)

        trainer.save_checkpoint = noted  # type: ignore[method-assign]

    def names(self) -> set[str]:
        return {name for name, _, _ in self.noted}

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(step, value) for own, step, value in self.noted if own == name]

    def since(self, step: int, name: str | None = None) -> list[tuple[Any, ...]]:
        return [
            each if name is None else each[1:]
            for each in self.noted
            if each[1] >= step and name in (None, each[0])
        ]


@check(KIND, "runs/two ranks", slow=True)
def _two_ranks(bench: Bench) -> None:
    """A run with two ranks ends normally, and no two ranks write to one file.

    The losses of one rank may be far smaller than those of the other.
    """
    here = os.path.realpath(bench.folder.parent)
    note = (bench.folder.parent / "written").open("a", buffering=1)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        path, mode = (*arguments, None, None)[:2]
        if event == "open" and isinstance(path, str) and set(str(mode)) & set("wax+"):
            note.write(f"{os.environ.get('RANK')} {os.path.realpath(path)}\n")

    sys.addaudithook(hear)
    options: Any = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1}
    error = bench.error(lambda: _fit(bench, bench.make(), **options))
    assert error is None, f"a run on two ranks ended in {brief(error)}"
    for rank in range(2):
        error = bench.error(
            lambda rank=rank: _trainer(bench, bench.make(), **options).fit(  # type: ignore[misc]
                _Unequal(rank), loader(32, 1), loader(16, 1)
            )
        )
        assert error is None, (
            f"a run on two ranks ended in {brief(error)}, as the losses of rank {rank} are tiny. "
            "What a callback decides by a value that ranks have differently, such as should_stop, "
            "they have to decide together: trainer.strategy.ranks.all_reduce(value)"
        )
    lines = set((bench.folder.parent / "written").read_text().splitlines())
    written = [line.partition(" ")[2] for line in lines if not line.startswith("None ")]
    twice = sorted({path for path in written if written.count(path) > 1 and path.startswith(here)})
    assert not twice, (
        f"both ranks write to {Path(twice[0]).name}: write where trainer.is_global_zero, or name "
        "files by the rank"
    )


check(KIND, "life/pickled")(pickled)
