"""A checkpoint that somebody else made removes, writes, lists and fetches nothing by its names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import CheckpointError
from stratagem.storage import paths


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(epochs: int, **options: Any) -> Trainer:
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=epochs,
        **options,
    )
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)
    trainer.fit(Line(), data, ckpt_path=ckpt_path)
    return trainer


def crafted(folder: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> Path:
    """A checkpoint of one epoch whose ModelCheckpoint's state was changed."""
    saver = ModelCheckpoint(folder, **options)
    fit(1, callbacks=saver)
    io = SingleFileCheckpointIO()
    checkpoint = io.load_checkpoint(saver.best_model_path)
    (key,) = (key for key in checkpoint["callbacks"] if key.startswith("ModelCheckpoint("))
    change(checkpoint["callbacks"][key])
    io.save_checkpoint(checkpoint, folder / "crafted.ckpt")
    return folder / "crafted.ckpt"


def all_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def victims(folder: Path) -> dict[str, bytes]:
    """Files that are nobody's checkpoints; returns what is in them."""
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis" / "chapter1.tex").write_text("1")
    (folder / "notes.txt").write_text("2")
    return all_in(folder)


@pytest.mark.parametrize("named", ["ModelCheckpoint", "default_root_dir"])
def test_files_anywhere_stay(named: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = victims(home)

    def change(state: dict[str, Any]) -> None:
        state["dirpath"] = str(home)
        state["best_k_models"] = {"thesis": 99.0, str(home / "thesis"): 98.0, "../home": 97.0}
        state["latest"] = ["notes.txt", "../home/notes.txt", "../../home/notes.txt"]
        state["last_model_path"] = "notes.txt"

    evil = crafted(tmp_path / "evil", change)
    own = tmp_path / "own"
    saver = ModelCheckpoint(own) if named == "ModelCheckpoint" else None
    options: dict[str, Any] = {"callbacks": saver} if saver else {"default_root_dir": own}
    with pytest.warns(UserWarning, match="names 4 other") as caught:
        trainer = fit(3, ckpt_path=evil, **options)
    assert [str(warning.message) for warning in caught] == [
        "the checkpoint that is resumed from names 4 other(s) that are not in its folder, such as "
        f"{str(home / 'thesis')!r}: they are left alone, and count neither as the best nor as the "
        "newest"
    ]
    assert all_in(home) == before
    chosen = trainer.checkpoint_callback
    assert chosen is not None
    assert [Path(path).name for path in chosen.kept_paths] == ["epoch=2-step=3.ckpt"]
    assert own in Path(chosen.best_model_path).parents


def test_objects_of_a_bucket_stay_without_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    bucket = f"memory://{tmp_path.name}"
    for name in ("data/2024/a.parquet", "data/b.parquet"):
        paths.write(f"{bucket}/{name}", b"rows")

    def change(state: dict[str, Any]) -> None:
        state["dirpath"] = bucket
        state["best_k_models"] = {"data": 99.0}
        state["latest"] = [f"{bucket}/data", f"simplecache::{bucket}/data"]
        state["last_model_path"] = f"{bucket}/data/b.parquet"

    evil = crafted(tmp_path / "evil", change)

    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"asked for {args}")

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in ("info", "exists", "ls", "rm", "_open"):
            patched.setattr(type(memory), method, asked)
        fit(3, ckpt_path=evil, callbacks=ModelCheckpoint(tmp_path / "own"))
    assert len(memory.find(f"/{tmp_path.name}")) == 2


def test_in_a_folder_of_a_bucket_only_checkpoints_of_this_run_are_removed(tmp_path: Path) -> None:
    memory, bucket = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    saver = ModelCheckpoint(bucket)
    fit(1, callbacks=saver)
    paths.write(f"{bucket}/data/b.parquet", b"rows")
    paths.write(f"{bucket}/notes.ckpt", b"notes")
    io = SingleFileCheckpointIO()
    checkpoint = io.load_checkpoint(saver.best_model_path)
    state = checkpoint["callbacks"][saver.state_key]
    state["best_k_models"] = {"data": 99.0, "notes.ckpt": 98.0, **state["best_k_models"]}
    state["latest"] = ["..", "data/b.parquet", "a\\b", "a::b", "nul\0", "x" * 300]
    io.save_checkpoint(checkpoint, tmp_path / "crafted.ckpt")
    with pytest.warns(UserWarning, match="names 6 other"):
        fit(3, callbacks=ModelCheckpoint(bucket), ckpt_path=tmp_path / "crafted.ckpt")
    assert {path.rpartition("/")[2] for path in memory.find(f"/{tmp_path.name}")} >= {
        "b.parquet",
        "notes.ckpt",
    }


def test_run_removes_only_checkpoints_with_its_own_run_id(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "elsewhere").mkdir()
    kept = ["broken.ckpt", "thesis", "link.ckpt", "others.ckpt"]

    def change(state: dict[str, Any]) -> None:
        values = {name: float(-number) for number, name in enumerate(kept)}
        state["best_k_models"] = {**state["best_k_models"], **values}

    evil = crafted(tmp_path / "evil", change)
    before = victims(own)
    (own / "broken.ckpt").write_bytes(b"not a checkpoint")
    evil_bytes = evil.read_bytes()
    (tmp_path / "elsewhere" / "copy.ckpt").write_bytes(evil_bytes)
    (own / "link.ckpt").symlink_to(tmp_path / "elsewhere" / "copy.ckpt")
    (own / "epoch=0-step=1.ckpt").write_bytes(evil_bytes)
    other = ModelCheckpoint(tmp_path / "other")
    fit(1, callbacks=other)
    Path(other.best_model_path).rename(own / "others.ckpt")
    before = all_in(own)
    fit(9, callbacks=ModelCheckpoint(own), ckpt_path=evil)
    after = all_in(own)
    # Its own is gone, which a readable manifest says; all others are as they were.
    assert "epoch=0-step=1.ckpt" not in after
    assert after == {
        **{name: data for name, data in before.items() if name != "epoch=0-step=1.ckpt"},
        "epoch=8-step=9.ckpt": after["epoch=8-step=9.ckpt"],
    }
    assert (own / "link.ckpt").is_symlink()
    assert all_in(tmp_path / "elsewhere") == {"copy.ckpt": evil_bytes}


def test_foreign_last_model_path_is_not_moved(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["last_model_path"] = "thesis.ckpt"

    evil = crafted(tmp_path / "evil", change, save_last=True)
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.ckpt").write_bytes(evil.read_bytes())
    fit(3, callbacks=ModelCheckpoint(own, save_last=True), ckpt_path=evil)
    assert (own / "thesis.ckpt").read_bytes() == evil.read_bytes()
    assert (own / "last.ckpt").readlink() == Path("epoch=2-step=3.ckpt")


def test_a_state_that_is_loaded_by_hand_names_nothing_outside(tmp_path: Path) -> None:
    state = {
        "dirpath": "/srv/somebody",
        "best_k_models": {"/etc/passwd": 3.0, "../a.ckpt": 2.0, "a.ckpt": 1.0},
        "latest": ["s3://bucket/a.ckpt"],
        "last_model_path": "/srv/somebody/last.ckpt",
    }
    saver = ModelCheckpoint(tmp_path)
    saver.load_state_dict(state)
    assert saver.kept_paths == [str(tmp_path / "a.ckpt")]
    assert saver.best_model_path == str(tmp_path / "a.ckpt")
    assert saver.last_model_path == ""
    without = ModelCheckpoint()
    without.load_state_dict(state)
    assert (without.kept_paths, without.best_model_path, without.last_model_path) == ([], "", "")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            {"best_k_models": ["a"]},
            "a list of 1 as ModelCheckpoint's 'best_k_models', expected",
        ),
        (
            {"best_k_models": {"a": "b"}},
            "the state of ModelCheckpoint['best_k_models']['a'] is 'b', expected a number",
        ),
        ({"latest": "a"}, "has 'a' as ModelCheckpoint's 'latest', expected a list"),
    ],
)
def test_a_state_of_another_form_is_refused(
    damage: dict[str, Any], said: str, tmp_path: Path
) -> None:
    evil = crafted(tmp_path / "evil", lambda state: state.update(damage))
    with pytest.raises(CheckpointError) as caught:
        fit(3, callbacks=ModelCheckpoint(tmp_path / "own"), ckpt_path=evil)
    assert said in str(caught.value)


def test_the_best_beside_the_checkpoint_that_is_resumed_from_counts_and_stays(
    tmp_path: Path,
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    first = ModelCheckpoint(before, save_top_k=2)
    fit(2, callbacks=first)
    second = ModelCheckpoint(after, save_top_k=2)
    fit(3, callbacks=second, ckpt_path=before / "epoch=1-step=2.ckpt")
    assert sorted(second.best_k_models.values()) == [2.0, 3.0]
    assert str(before / "epoch=1-step=2.ckpt") in second.best_k_models
    fit(4, callbacks=second, ckpt_path=before / "epoch=1-step=2.ckpt")
    assert sorted(path.name for path in before.iterdir()) == [
        "epoch=0-step=1.ckpt",
        "epoch=1-step=2.ckpt",
    ]
