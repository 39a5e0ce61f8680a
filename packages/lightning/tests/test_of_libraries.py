"""What libraries override and read of Lightning's private parts works as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.demos.boring_classes import BoringModel
from stratagem_lightning.api.trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 3,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, "enable_checkpointing": False, **options})


class WithExport(ModelCheckpoint):
    """Keeps a file beside each checkpoint, and ranks checkpoints by a value of its own."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        Path(f"{filepath}.export").touch()

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        Path(f"{filepath}.export").unlink()

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        own = {"own": torch.tensor(float(trainer.current_epoch))}
        return {**super()._monitor_candidates(trainer), **own}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["epoch=2-step=6.ckpt"]),
        ({"save_last": True}, ["epoch=2-step=6.ckpt", "last.ckpt"]),
        (
            {"monitor": "own", "mode": "max", "save_top_k": 2, "filename": "{own:.0f}"},
            ["own=1.ckpt", "own=2.ckpt"],
        ),
    ],
)
def test_a_checkpoint_callback_that_saves_and_removes_more_is_called(
    options: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    saver = WithExport(tmp_path, **options)
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    beside = [f"{name}.export" for name in kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *beside])
    assert saver._last_checkpoint_saved == str(tmp_path / kept[-1])


def test_a_link_to_the_last_checkpoint_is_no_save(tmp_path: Path) -> None:
    saver = WithExport(tmp_path, save_last="link")
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    assert (tmp_path / "last.ckpt").is_symlink()
    assert not (tmp_path / "last.ckpt.export").exists()


def test_a_checkpoint_callback_may_write_a_folder_of_its_own(tmp_path: Path) -> None:
    class Adapter(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            Path(filepath).mkdir()
            (Path(filepath) / "adapter.bin").touch()
            self._last_global_step_saved = trainer.global_step

    saver = Adapter(tmp_path, every_n_train_steps=2)
    quiet(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=2-step=6.ckpt"]
    assert (Path(saver.best_model_path) / "adapter.bin").exists()
    assert (saver._every_n_train_steps, saver._every_n_epochs) == (2, 0)
