"""Each row of docs/reference/private-names.md is true."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Callback
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.rich_bar import RichProgressBar
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.placeholders import Placeholder
from stratagem_lightning.api.strategies.ddp import DDPStrategy
from stratagem_lightning.api.trainer import Trainer

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts/private_names.py"))
BASES = {kind.__name__: kind for kind in (DDPStrategy, ModelCheckpoint, RichProgressBar)}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_model_summary": False,
}
ROWS = {how: [row for row in SCRIPT["rows"]() if row.how == how] for how in SCRIPT["TITLES"]}
OVERRIDDEN = {
    kind: [row for row in ROWS["override"] if row.name.startswith(kind)] for kind in BASES
}


def test_private_names_page_agrees_with_its_rows() -> None:
    made = SCRIPT["page"]()
    assert SCRIPT["PAGE"].read_text() == made, "run packages/lightning/scripts/private_names.py"
    assert sum(map(len, OVERRIDDEN.values())) == len(ROWS["override"])


class Values(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0 / (1 + self.current_epoch))


def overriding(base: Any, names: list[str], called: set[str]) -> Any:
    """Return a subclass that overrides these names, and notes which are called."""

    def override(name: str) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            called.add(name)
            return getattr(super(kind, self), name)(*args, **options)

        def read(self: Any) -> Any:
            called.add(name)
            return getattr(super(kind, self), name)

        return call if callable(getattr(base, name, call)) else property(read)

    kind: Any = type("Mine", (base,), {name: override(name) for name in names})
    return kind


def run(kind: str, made: Any, tmp_path: Path) -> None:
    """Fit with an object of a kind, then go on from a checkpoint."""
    if kind == "DDPStrategy":
        trainer = Trainer(
            **QUIET, strategy=made(), enable_checkpointing=False, enable_progress_bar=False
        )
        trainer.fit(Values())
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        trainer.validate(Values(), ckpt_path=tmp_path / "own.ckpt", verbose=False)
        torch.distributed.destroy_process_group()
    elif kind == "ModelCheckpoint":
        for monitor in ("value", None):
            saver = made(tmp_path / str(monitor), monitor=monitor, save_last=True)
            trainer = Trainer(**QUIET, callbacks=saver, enable_progress_bar=False)
            trainer.fit(Values())
    else:
        Trainer(**QUIET, callbacks=made(), enable_checkpointing=False).fit(Values())


@pytest.mark.parametrize("kind", ["DDPStrategy", "ModelCheckpoint"])
def test_an_override_that_works_is_called(kind: str, tmp_path: Path) -> None:
    names = [row.name.partition(".")[2] for row in OVERRIDDEN[kind] if row.here == "works"]
    called: set[str] = set()
    run(kind, overriding(BASES[kind], names, called), tmp_path)
    assert called == set(names)


REFUSED = [row for row in ROWS["override"] if row.here != "works"]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_an_override_that_is_not_called_is_refused(row: Any, tmp_path: Path) -> None:
    kind, _, name = row.name.partition(".")
    made = type("Mine", (BASES[kind],), {name: "" if name.isupper() else lambda self: None})
    with pytest.raises(Exception, match="Mine") as raised:
        run(kind, made, tmp_path)
    assert row.here in str(raised.value)


def test_private_attributes_in_a_hook_work_or_raise_advice() -> None:
    found: dict[str, str] = {}

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            for row in ROWS["read"]:
                try:
                    eval(row.name, {"trainer": trainer})
                except AttributeError as error:
                    found[row.name] = str(error)
                else:
                    found[row.name] = "works"

    options = {"enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(**QUIET, **options, callbacks=Reading()).fit(Values())
    assert len(found) == len(ROWS["read"])
    for row in ROWS["read"]:
        said = found[row.name]
        assert said == "works" if row.here == "works" else row.here in said


@pytest.mark.parametrize("row", ROWS["import"], ids=lambda row: row.name)
def test_private_imports_work_or_raise_advice(row: Any) -> None:
    module, _, name = f"stratagem_lightning.{row.name}".rpartition(".")
    said = "works"
    try:
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, Placeholder):
            found()
    except (AttributeError, ImportError, ConfigurationError) as error:
        said = str(error)
    assert said == "works" if row.here == "works" else row.here in said
