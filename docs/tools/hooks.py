"""Tables of the hooks of callbacks and of a Module, for docs/guides/callbacks.md.

When a hook runs, and its arguments, come from the code. Whether it may log comes from a short run.
The texts about ranks and changes stand here. A hook without a text here fails the build.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem import Callback, DataModule, Module, Trainer
from stratagem.errors import UserCodeError
from stratagem.module import DataHooks, ModuleHooks
from stratagem.module.step_hooks import StepHooks
from stratagem.trainer.hooks import HOOKS

PLACE = "docs/tools/hooks.py"

# Words that the page explains.
NOTHING = "-"
LAYERS = "layers"
SET = "freezing, groups"
WEIGHTS = "weights"
BATCH = "the batch, in place"
GRADIENTS = "gradients"
STOP = "`trainer.should_stop`"
HAVE_BATCH = "those that have a batch"

CHANGES = {
    "setup": LAYERS,
    "teardown": NOTHING,
    "on_fit_start": SET,
    "on_fit_end": NOTHING,
    "on_sanity_check_start": NOTHING,
    "on_sanity_check_end": NOTHING,
    "on_train_start": SET,
    "on_train_end": WEIGHTS,
    "on_train_epoch_start": SET,
    "on_train_epoch_end": f"{SET}, {WEIGHTS}, {STOP}",
    "on_train_batch_start": f"{BATCH}; return -1 to end the epoch",
    "on_train_batch_end": f"{WEIGHTS}, {STOP}",
    "on_before_backward": NOTHING,
    "on_after_backward": NOTHING,
    "on_before_optimizer_step": GRADIENTS,
    "on_before_zero_grad": WEIGHTS,
    "on_validation_start": NOTHING,
    "on_validation_end": STOP,
    "on_validation_epoch_start": NOTHING,
    "on_validation_epoch_end": NOTHING,
    "on_validation_batch_start": BATCH,
    "on_validation_batch_end": NOTHING,
    "on_test_start": NOTHING,
    "on_test_end": NOTHING,
    "on_test_epoch_start": NOTHING,
    "on_test_epoch_end": NOTHING,
    "on_test_batch_start": BATCH,
    "on_test_batch_end": NOTHING,
    "on_predict_start": NOTHING,
    "on_predict_end": NOTHING,
    "on_predict_epoch_start": NOTHING,
    "on_predict_epoch_end": NOTHING,
    "on_predict_batch_start": BATCH,
    "on_predict_batch_end": "the predictions, in place",
    "on_exception": NOTHING,
    "on_save_checkpoint": "`checkpoint`: add weights-only-safe entries",
    "on_load_checkpoint": "`checkpoint`, before it is loaded",
}
"""What a callback, or a Module by the hook of the same name, may change in each hook."""

RANKS = {
    **{
        f"on_{what}_batch_{point}": HAVE_BATCH
        for what in ("validation", "test", "predict")
        for point in ("start", "end")
    },
    "on_exception": "those that raise",
    "prepare_data": "rank 0 of each node",
}
"""The ranks of a hook that not every rank calls, or not equally often."""

MODULE_CHANGES = {
    "prepare_data": "files; not `self`, since other ranks do not see it",
    "configure_model": "layers; under `fsdp` they are sharded as they are made",
    "configure_callbacks": "returns callbacks",
    "configure_optimizers": "returns optimizers and schedulers",
    "train_dataloader": "returns the loader",
    "val_dataloader": "returns a loader or several",
    "test_dataloader": "returns a loader or several",
    "predict_dataloader": "returns a loader or several",
    "on_before_batch_transfer": "returns the batch",
    "transfer_batch_to_device": "returns the batch",
    "on_after_batch_transfer": "returns the batch; augment it here, on the device",
    "optimizer_step": "when and how the optimizer steps",
    "optimizer_zero_grad": "how gradients are cleared",
    "backward": "how gradients are computed",
    "configure_gradient_clipping": "gradients, in place",
    "lr_scheduler_step": "how a scheduler steps",
    "on_validation_model_zero_grad": "gradients",
    **{
        f"on_{what}_model_{mode}": "modes of submodules"
        for mode in ("eval", "train")
        for what in ("validation", "test", "predict")
    },
}
"""What may be changed in each hook that a Module or a DataModule has and a callback has not."""

METHODS_TO_CALL = {"clip_gradients", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"}
"""Public methods of StepHooks that are not hooks."""


def fragments() -> dict[str, str]:
    """Return the tables by the names of their files."""
    return {"callback-hooks": callback_table(), "module-hooks": module_table()}


def callback_table() -> str:
    """Return the table of the hooks of Callback."""
    check_rows(set(HOOKS), set(CHANGES), "CHANGES")
    logs = hooks_that_log()
    lines = [
        "| hook | when | arguments after `trainer`, `module` | on which ranks | `self.log` | what "
        "may be changed |",
        "|---|---|---|---|---|---|",
    ]
    for name in HOOKS:
        link = f"{{py:obj}}`{name} <stratagem.callbacks.Callback.{name}>`"
        hook = getattr(Callback, name)
        cells = (link, when(hook), arguments(hook, 3), ranks(name), logs[name], CHANGES[name])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def module_table() -> str:
    """Return the table of the hooks that a Module has and a callback has not."""
    check_rows(module_hooks(), set(MODULE_CHANGES), "MODULE_CHANGES")
    lines = [
        "| hook of a `Module` | when | arguments | on which ranks | what may be changed |",
        "|---|---|---|---|---|",
    ]
    for name, change in MODULE_CHANGES.items():
        hook = getattr(Module, name)
        of_data = " (also of a `DataModule`)" if hasattr(DataModule, name) else ""
        cells = (f"`{name}`{of_data}", when(hook), arguments(hook, 1), ranks(name), change)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def check_rows(hooks: set[str], rows: set[str], table: str) -> None:
    """Compare the hooks of the code with the rows of a table.

    Raises:
        ValueError: a hook has no row, or a row has no hook.
    """
    if hooks != rows:
        raise ValueError(
            f"{PLACE}: {table} lacks rows for the hooks {sorted(hooks - rows)}, and has rows for "
            f"{sorted(rows - hooks)}, which are no hooks: add or remove these rows"
        )


def module_hooks() -> set[str]:
    """Return the hooks that a Module has and a callback has not."""
    owners = (ModuleHooks, DataHooks, StepHooks)
    named = {name for owner in owners for name in public_functions(owner)}
    overridden = {name for name in public_functions(Module) if name.startswith("configure_")}
    former = {"configure_sharded_model"}
    return (named | overridden) - METHODS_TO_CALL - former - set(HOOKS)


def public_functions(owner: type) -> Iterator[str]:
    """Yield the names of a class's own public methods."""
    for name, value in vars(owner).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name


def when(hook: Callable[..., Any]) -> str:
    """Return the first line of a hook's docstring, for a cell."""
    first = (inspect.getdoc(hook) or "").partition("\n\n")[0]
    text = " ".join(first.split()).removeprefix("Called ").rstrip(".")
    return (text[:1].upper() + text[1:]).replace("|", "\\|")


def arguments(hook: Callable[..., Any], skipped: int) -> str:
    """Return the names of a hook's arguments without the first ones."""
    parameters = list(inspect.signature(hook).parameters.values())[skipped:]
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return ", ".join(f"`{each.name}`" for each in named)


def ranks(name: str) -> str:
    """Return the ranks on which a hook runs."""
    return RANKS.get(name, "each")


class _Tiny(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def hooks_that_log() -> dict[str, str]:
    """Call every hook in a short run; return whether `self.log` works there: "yes" or "no"."""
    found = dict.fromkeys(HOOKS, "no")

    def hook(name: str, callback: Callback, *_: Any) -> None:
        try:
            callback.log(name, 1.0)
            found[name] = "yes"
        except UserCodeError:
            found[name] = "no"

    class Tries(Callback):
        pass

    tries = Tries()
    for name in HOOKS:
        setattr(tries, name, partial(hook, name, tries))
    options: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=tries, **options)
    rows: Any = torch.ones(2, 1)
    loader: Any = DataLoader(rows, 1)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(_Tiny(), loader, loader)
            trainer.test(_Tiny(), loader, verbose=False)
            trainer.predict(_Tiny(), loader)
    finally:
        logging.disable(before)
    found["on_save_checkpoint"] = "as where the save is made"
    return found
