"""The format of a Trainer's checkpoint: its version, and whether a dict is one."""

from __future__ import annotations

from typing import Any

from stratagem import __version__
from stratagem.checkpoint.forms import Count, find_mismatch
from stratagem.discovery.entry_points import DISABLE_VARIABLE
from stratagem.discovery.registry import get_registry
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    PluginError,
    format_names,
    format_text,
    format_value,
)
from stratagem.storage import paths

_LIGHTNING = "pytorch-lightning_version"
"""The key of Lightning's checkpoints, known here for an error that says what to install."""
FORMAT_VERSION = 2
"""The version of the table of keys in `stratagem.trainer.resume.checkpoint`."""


_FORM = {
    **dict.fromkeys(("format_version?", "epoch?", "global_step?"), Count),
    **dict.fromkeys(("run?", "hparams_name?", "datamodule_hparams_name?"), str),
    **dict.fromkeys(("state_dict?", "hyper_parameters?", "datamodule_hyper_parameters?"), dict),
    **dict.fromkeys(("hparams_configs?", "datamodule_hparams_configs?"), list),
    "ranks?": ([dict], {"first": dict, "changes": object, "ends": object}),
}
_TRAINING_FORM = {
    # The fields that `FitState` marks as saved. Older checkpoints lack some.
    "progress": {
        **dict.fromkeys(("epoch", "global_step", "batches", "validated"), Count),
        **dict.fromkeys(("batches_before?", "last_step?"), Count),
        **dict.fromkeys(("epoch_is_done", "end_begun?", "stop_delayed?"), bool),
    },
    "optimizer_states": list,
    "lr_schedulers": list,
    "precision": dict,
    "callbacks": {str: object},
}
"""Of a checkpoint with more than weights."""


def check_trainer_checkpoint(
    checkpoint: dict[str, Any], path: paths.Location | str
) -> dict[str, Any]:
    """Return a Trainer's checkpoint, converted by a plugin if it has a foreign form.

    Raises:
        CheckpointCorruptError: the checkpoint has another format version, or an entry has another
            type.
        CheckpointMismatchError: the checkpoint has no weights.

    Example:
        >>> from stratagem.checkpoint import FORMAT_VERSION, check_trainer_checkpoint
        >>> saved = {"format_version": FORMAT_VERSION, "state_dict": {}}
        >>> check_trainer_checkpoint(saved, "last.ckpt") is saved
        True
    """
    if "format_version" not in checkpoint:
        checkpoint = _converted(checkpoint, str(path))
    form = {**_FORM, **(_TRAINING_FORM if "progress" in checkpoint else {})}
    if fault := find_mismatch(checkpoint, form, ""):
        raise CheckpointCorruptError(f"{str(path)!r} is damaged: {fault}")
    version = checkpoint.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        advice = "upgrade stratagem-core" if version > FORMAT_VERSION else "no release wrote it"
        raise CheckpointCorruptError(
            f"{str(path)!r} has format version {version}, made by stratagem "
            f"{format_text(str(checkpoint.get('stratagem_version')))}; this is stratagem "
            f"{__version__}, which reads version {FORMAT_VERSION}: {advice}"
        )
    if "state_dict" not in checkpoint:
        raise CheckpointMismatchError(
            f"{str(path)!r} has no 'state_dict'; it has {format_names(checkpoint, 20)}: "
            "expected a checkpoint that a Trainer saved (one of Lite's is loaded with Lite.load)"
        )
    return checkpoint


def _converted(checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the first answer of a plugin that knows the checkpoint's form, or the checkpoint."""
    registry = get_registry()
    for plugin, answer in registry.call_hook(
        "stratagem_read_checkpoint", contents=checkpoint, path=path
    ):
        if isinstance(answer, dict):
            return answer
        if answer is not None:
            raise PluginError(
                f"the plugin {plugin} returned a {type(answer).__name__} from "
                f"stratagem_read_checkpoint for {path!r}; expected a dict, or None if it does not "
                f"know the form: disable it with {DISABLE_VARIABLE}"
            )
    if version := checkpoint.get(_LIGHTNING):
        raise CheckpointMismatchError(
            f"{path!r} is a checkpoint of Lightning {format_value(version)}, which needs a plugin "
            f"to be read. {' '.join(registry.possible_providers('lightning'))}"
        )
    return checkpoint
