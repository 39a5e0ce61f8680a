"""Checkpoints of Lightning 2.x as a Trainer's, and the reverse.

What the two have in common is moved to where the other one looks for it: weights,
hyperparameters, the states of optimizers and schedulers, where training is, and the states of
callbacks of the user's own; of Lightning's EarlyStopping too. A ModelCheckpoint's state is not
taken over: it names files, and begins anew. Lightning keeps no RNG states and no place in the data.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem import __version__
from stratagem.errors import CheckpointCorruptError, format_value

MARK = "pytorch-lightning_version"
"""The entry that each of its checkpoints has."""
WRITTEN_VERSION = "2.6.6"
"""What it says in those that are written here, whose form is that version's."""
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_PHASES = ("ready", "started", "processed", "completed")
_OF_STEPS = ("ready", "completed")
_BUILT_IN = (
    *("BackboneFinetuning", "BaseFinetuning", "BatchSizeFinder", "EMAWeightAveraging"),
    *("LearningRateFinder", "ModelCheckpoint", "ModelPruning", "StochasticWeightAveraging"),
    *("WeightAveraging",),
)
"""Callbacks whose state is of another form there."""


def is_lightnings(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning wrote a checkpoint."""
    return MARK in checkpoint and "format_version" not in checkpoint


def from_lightning(checkpoint: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a checkpoint of Lightning to a checkpoint of a Trainer; user entries stay.

    Args:
        checkpoint: a checkpoint from `torch.save`, read as weights-only-safe data.
        path: the name of the checkpoint in errors.

    Raises:
        CheckpointCorruptError: the checkpoint does not have the form of Lightning 2.x.

    Example:
        >>> saved = {MARK: "2.6.6", "epoch": 1, "global_step": 8, "state_dict": {}}
        >>> from_lightning(saved, "theirs.ckpt")["global_step"]
        8
    """
    known = (MARK, "loops", "callbacks", "optimizer_states", "lr_schedulers")
    taken = {name: value for name, value in checkpoint.items() if name not in known}
    loops = checkpoint.get("loops")
    if loops is None or "optimizer_states" not in checkpoint:
        return taken
    try:
        fit = loops["fit_loop"]
        epochs = _counts(fit["epoch_progress"]["current"])
        batches = _counts(fit["epoch_loop.batch_progress"]["current"])
        of_all_epochs = _counts(fit["epoch_loop.batch_progress"]["total"])
        is_last = bool(fit["epoch_loop.batch_progress"]["is_last_batch"])
    except (KeyError, TypeError) as error:
        raise CheckpointCorruptError(
            f"{path!r} says that Lightning {format_value(checkpoint[MARK])} has saved it, and its "
            f"entry 'loops' is not that of a version 2.x ({type(error).__name__}: {error}): load "
            "its weights with load_from_checkpoint, or upgrade it by Lightning's own program"
        ) from error
    is_done = is_last or epochs["completed"] >= epochs["ready"]
    # In the hooks at a batch's end, the batch is processed and not completed.
    trained = batches["processed"]
    return {
        **taken,
        "progress": {
            "epoch": max(0, epochs["ready"] - 1) if trained else epochs["completed"],
            "global_step": checkpoint.get("global_step", 0),
            "batches": trained,
            "batches_before": max(0, of_all_epochs["processed"] - trained),
            "epoch_is_done": is_done and trained > 0,
            "validated": trained if is_done else 0,
        },
        "optimizer_states": checkpoint["optimizer_states"],
        "lr_schedulers": checkpoint.get("lr_schedulers", []),
        "precision": {},
        "callbacks": _callbacks(checkpoint.get("callbacks", {})),
    }


def _counts(progress: Any) -> dict[str, int]:
    return {name: int(progress[name]) for name in ("ready", "processed", "completed")}


def _callbacks(states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the states of callbacks by the keys that they have here."""
    taken: dict[str, Any] = {}
    for key, state in states.items():
        name = str(key).partition("{")[0]
        if name in _BUILT_IN or not isinstance(state, Mapping):
            continue
        if name == "EarlyStopping":
            taken[_own_key(str(key))] = {
                "best_score": float(state.get("best_score", "nan")),
                "wait_count": state.get("wait_count", 0),
                "stopped_epoch": state.get("stopped_epoch", 0),
            }
        else:
            taken[str(key)] = state
    return taken


def _own_key(key: str) -> str:
    """Return the key of Stratagem's EarlyStopping for that of Lightning's."""
    given = _literal(key.removeprefix("EarlyStopping"))
    return f"EarlyStopping({given.get('monitor')}, {given.get('mode')})"


def _literal(text: str) -> Mapping[str, Any]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def to_lightning(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's checkpoint as Lightning 2.x writes one.

    Its Trainer loads it by `ckpt_path`, its LightningModule by `load_from_checkpoint`. Parameters
    are numbered in the order of the optimizer's groups, as torch does.

    Args:
        checkpoint: a checkpoint of a Trainer, with unsharded tensors.

    Example:
        >>> theirs = to_lightning({"epoch": 0, "global_step": 4, "state_dict": {}})
        >>> theirs["pytorch-lightning_version"], theirs["global_step"]
        ('2.6.6', 4)
    """
    ours = ("format_version", "stratagem_version", "run", "strategy", "world_size", "nonfinite")
    moved = ("progress", "precision", "ranks", "strategy_state", "callbacks", "optimizer_states")
    written = {name: value for name, value in checkpoint.items() if name not in (*ours, *moved)}
    written[MARK] = WRITTEN_VERSION
    written["stratagem_version"] = checkpoint.get("stratagem_version", __version__)
    if written.get("hyper_parameters"):
        written.setdefault("hparams_name", "kwargs")
    progress = checkpoint.get("progress")
    if progress is None:
        return {**written, "loops": {}}
    return {
        **written,
        "optimizer_states": [_by_number(state) for state in checkpoint["optimizer_states"]],
        "callbacks": {
            key: state
            for key, state in checkpoint.get("callbacks", {}).items()
            if re.split("[({]", key)[0] not in (*_BUILT_IN, "EarlyStopping")
        },
        "loops": loops_of(progress),
    }


def loops_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of training as Lightning writes it: counters of each loop.

    Args:
        progress: the entry of a Trainer's checkpoint.

    Example:
        >>> progress = {"epoch": 1, "batches": 0, "global_step": 8, "epoch_is_done": False}
        >>> loops_of(progress)["fit_loop"]["epoch_progress"]["current"]["completed"]
        1
    """
    return {name: _loop(name, progress) for name in _LOOPS}


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers in the place of parameter names, as torch has it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    other = state.get("other_state", {})
    entries = {numbers[name]: entry for name, entry in state["state"].items()}
    return {
        **other,
        "state": {**entries, **other.get("state", {})},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _loop(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    if name != "fit_loop":
        return {"state_dict": {}, "batch_progress": {**_both(0), "is_last_batch": False}}
    epoch, batches, steps = (progress[each] for each in ("epoch", "batches", "global_step"))
    is_done = bool(progress["epoch_is_done"])
    begun = epoch + (batches > 0)
    done = epoch + is_done
    automatic = "epoch_loop.automatic_optimization"
    manual = "epoch_loop.manual_optimization"
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": {
            "total": dict.fromkeys(_PHASES, progress.get("batches_before", 0) + batches),
            "current": dict.fromkeys(_PHASES, batches),
            "is_last_batch": is_done,
        },
        "epoch_loop.scheduler_progress": _both(done, _OF_STEPS),
        f"{automatic}.state_dict": {},
        f"{automatic}.optim_progress": {
            "optimizer": {
                "step": _both(steps, _OF_STEPS),
                "zero_grad": _both(steps, ("ready", "started", "completed")),
            }
        },
        f"{manual}.state_dict": {},
        f"{manual}.optim_step_progress": _both(0, _OF_STEPS),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**_both(0), "is_last_batch": False},
        "epoch_progress": {
            each: {"ready": begun, "started": begun, "processed": done, "completed": done}
            for each in ("total", "current")
        },
    }


def _both(count: int, phases: Sequence[str] = _PHASES) -> dict[str, Any]:
    return {each: dict.fromkeys(phases, count) for each in ("total", "current")}
