"""Checkpoints of Lightning 2.x are loaded, and written on request.

`tests/scripts/lightning_run.py` has the model, and made the file of Lightning's. That Lightning
2.6.6 itself goes on from files that are written here was tried by hand; no test has it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Program
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, checkpoint
from stratagem.callbacks import EarlyStopping
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import CheckpointCorruptError, CheckpointMismatchError, with_explanation
from stratagem_lightning.api.utilities.exceptions import StateDictError
from stratagem_lightning_plugin.checkpoint_format import from_lightning, to_lightning
from stratagem_lightning_plugin.checkpoint_io import LightningCheckpointIO

THEIRS = Path(__file__).parent / "data" / "lightning_2.6.6.ckpt"
TO_LIGHTNING = ("--to", "lightning")
QUIET: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu"}


class Line(Module):
    def __init__(self, lr: float = 0.1, sizes: tuple[int, int] = (3, 1)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(*sizes)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.0)
        self.begun: tuple[int, int, float] | None = None

    def on_train_start(self) -> None:
        rate = self.optimizers().param_groups[0]["lr"]
        self.begun = (self.trainer.current_epoch, self.trainer.global_step, rate)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.layer(batch) - 1.0).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader() -> DataLoader[Any]:
    return DataLoader(torch.linspace(-1, 2, 36).reshape(12, 3), batch_size=2)  # type: ignore[arg-type]


def fit(path: Path | None, **options: Any) -> Line:
    model = Line()
    trainer = Trainer(**{"max_epochs": 3, "enable_checkpointing": False, **QUIET, **options})
    trainer.fit(model, loader(), loader(), ckpt_path=path)
    return model


def weights(model: Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_run_resumes_from_a_lightning_checkpoint() -> None:
    resumed = fit(THEIRS, callbacks=EarlyStopping("val_loss", patience=7), max_epochs=2)
    assert resumed.begun == (1, 9, 0.05)
    # The file was saved on another machine, which rounds differently.
    assert weights(resumed) == pytest.approx(weights(fit(None, max_epochs=2)), abs=1e-6)


def test_a_model_is_made_of_lightnings_checkpoint() -> None:
    model = Line.load_from_checkpoint(THEIRS)
    assert model.hparams == {"lr": 0.1, "sizes": (3, 1)}
    assert weights(model) == pytest.approx(weights(fit(None, max_steps=9)), abs=1e-6)


def test_lightnings_checkpoint_of_another_optimizer_is_refused() -> None:
    class TwoGroups(Line):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [p]} for p in self.parameters()]
            optimizer = torch.optim.Adam(groups, lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    trainer = Trainer(max_epochs=2, enable_checkpointing=False, **QUIET)
    with pytest.raises(CheckpointMismatchError, match=r"groups of \[2\] parameters, .* \[1, 1\]"):
        trainer.fit(TwoGroups(), loader(), ckpt_path=THEIRS)


def test_a_loop_of_another_form_is_refused() -> None:
    saved = {"pytorch-lightning_version": "1.2.0", "loops": {}, "optimizer_states": []}
    with pytest.raises(CheckpointCorruptError, match=r"Lightning '1\.2\.0' has saved it, .* 2\.x"):
        from_lightning({**saved, "state_dict": {}}, "old.ckpt")


def test_states_that_name_files_are_not_taken_over() -> None:
    saved = SingleFileCheckpointIO().load_checkpoint(THEIRS)
    saved["callbacks"]["UsersOwn"] = {"seen": 3}
    saved["of the user"] = 5
    taken = from_lightning(saved, "theirs.ckpt")
    assert sorted(taken["callbacks"]) == ["EarlyStopping(val_loss, min)", "UsersOwn"]
    assert taken["of the user"] == 5
    stopping = taken["callbacks"]["EarlyStopping(val_loss, min)"]
    assert stopping["best_score"] == pytest.approx(0.63552, rel=1e-4)


def program(folder: Path) -> Program:
    """Return the `stratagem` program with this distribution's plugin, run in a folder."""
    found = Program(folder)
    found.plugins.append("stratagem-lightning")
    return found


def plugin(path: Path) -> None:
    trainer = Trainer(max_steps=9, enable_checkpointing=False, plugins="lightning", **QUIET)
    trainer.fit(Line(), loader(), loader())
    trainer.save_checkpoint(path)


def command(path: Path) -> None:
    trainer = Trainer(max_steps=9, enable_checkpointing=False, **QUIET)
    trainer.fit(Line(), loader(), loader())
    trainer.save_checkpoint(path.with_suffix(".ours"))
    told = program(path.parent)("checkpoint", "convert", "written.ours", path.name, *TO_LIGHTNING)
    assert "all that Lightning resumes from" in told.stdout


@pytest.mark.parametrize("write", [plugin, command])
def test_written_checkpoint_has_the_keys_of_lightning(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "written.ckpt"
    write(path)
    written, theirs = torch.load(path), torch.load(THEIRS)
    for saved in (written, theirs):
        saved["loops"]["fit_loop"].pop("epoch_loop.val_loop.batch_progress")
    differing = {"stratagem_version"}
    assert written.keys() - differing == theirs.keys()
    assert written["loops"].keys() == theirs["loops"].keys()
    assert written["loops"]["fit_loop"].keys() == theirs["loops"]["fit_loop"].keys()
    for name in ("global_step", "epoch", "hyper_parameters", "lr_schedulers", "hparams_name"):
        assert written[name] == theirs[name], name
    own, other = (saved["optimizer_states"][0] for saved in (written, theirs))
    assert own["param_groups"] == other["param_groups"]
    assert own["state"].keys() == other["state"].keys()
    resumed = fit(path, max_epochs=2)
    assert resumed.begun == (1, 9, 0.05)
    # The file was saved on another machine, which rounds differently.
    assert weights(resumed) == pytest.approx(weights(fit(None, max_epochs=2)), abs=1e-6)


def test_core_serves_the_format_by_its_class() -> None:
    assert checkpoint.LightningCheckpointIO is LightningCheckpointIO  # type: ignore[attr-defined]


def test_to_lightning_writes_global_optimizer_state() -> None:
    state = {
        "state": {"w": {"step": 1}},
        "param_groups": [{"params": ["w"], "lr": 0.1}],
        "other_state": {"k": 3, "state": {"global": {"steps": 2}}},
    }
    progress = {"epoch": 0, "batches": 0, "global_step": 1, "epoch_is_done": False}
    saved = {"format_version": 2, "state_dict": {}, "epoch": 0, "global_step": 1}
    written = to_lightning({**saved, "progress": progress, "optimizer_states": [state]})
    assert written["optimizer_states"] == [
        {
            "k": 3,
            "state": {0: {"step": 1}, "global": {"steps": 2}},
            "param_groups": [{"params": [0], "lr": 0.1}],
        }
    ]


def test_weights_alone_are_written_for_lightning_too() -> None:
    written = to_lightning({"format_version": 2, "state_dict": {}, "epoch": 1, "global_step": 3})
    assert written["loops"] == {}
    assert "optimizer_states" not in written


def test_lightning_checkpoint_io_keeps_other_contents(tmp_path: Path) -> None:
    path = tmp_path / "lite.ckpt"
    LightningCheckpointIO().save_checkpoint({"epoch": 3}, path)
    assert torch.load(path) == {"epoch": 3}


def test_convert_lists_its_target_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.ckpt"
    shutil.copy(THEIRS, source)
    arguments = ("checkpoint", "convert", source.name, "x", "--to", "onnx")
    told = program(tmp_path)(*arguments, code=1)
    assert (
        "to='onnx': expected 'safetensors', 'huggingface', 'lightning' or 'checkpoint'"
        in told.stderr
    )


def test_the_error_of_another_models_weights_keeps_its_last_line() -> None:
    error = CheckpointMismatchError(with_explanation("it lacks a", "checkpoint-mismatch"), ["a"])
    assert str(StateDictError.of(error)).splitlines() == [
        'it lacks a. Missing key(s) in state_dict: "a"',
        "For an explanation: stratagem errors checkpoint-mismatch",
    ]
