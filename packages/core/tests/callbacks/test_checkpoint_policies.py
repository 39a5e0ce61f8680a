"""Which checkpoints are kept, which is the last one, and whose they are."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.callbacks.checkpoints.names import CheckpointNames
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    ConfigurationError,
    UserCodeError,
)
from stratagem.loggers import CSVLogger
from stratagem.storage.claims import claim

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


class Line(Module):
    """A line; its steps need no time. `scores` are logged as "score", one for each step."""

    def __init__(self, scores: tuple[float, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.scores = scores
        self.first_step: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.first_step is None:
            self.first_step = self.global_step
        if self.scores:
            self.log("score", self.scores[self.global_step])
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=1)


def fit(saver: ModelCheckpoint, steps: int, *callbacks: Callback, **arguments: Any) -> Line:
    """Train for so many steps, eight in an epoch, and return the model."""
    model: Line = arguments.pop("model", None) or Line()
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_steps=steps,
        callbacks=[saver, *callbacks],
        **arguments,
    )
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return model


def each_step(folder: Path, **arguments: Any) -> ModelCheckpoint:
    arguments = {"filename": "{step}", "every_n_train_steps": 1, **arguments}
    return ModelCheckpoint(folder, **arguments)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- when, and which


def test_steps_epochs_and_time_may_be_combined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Slow(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nonlocal now
            now += 1.0
            return super().training_step(batch, batch_idx)

    clock_of_runs = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("stratagem.trainer.loops.interruption.time", clock_of_runs)
    saver = each_step(
        tmp_path,
        save_top_k=-1,
        every_n_train_steps=5,
        every_n_epochs=1,
        train_time_interval=timedelta(seconds=3),
    )
    fit(saver, 12, model=Slow())
    # 3 by time; 5 by steps; 8 by time and epoch, once; 10 by steps; 12 is the end.
    assert [path.removesuffix(".ckpt") for path in names(tmp_path)] == [
        "step=10",
        "step=12",
        "step=3",
        "step=5",
        "step=8",
    ]


def test_without_a_monitor_the_newest_k_are_kept(tmp_path: Path) -> None:
    saver = each_step(tmp_path, save_top_k=3)
    fit(saver, 7)
    assert names(tmp_path) == ["step=5.ckpt", "step=6.ckpt", "step=7.ckpt"]
    assert saver.best_model_path == str(tmp_path / "step=7.ckpt")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [3, 5]),
        ({"keep_latest_k": 1}, [3, 5, 8]),
        ({"keep_latest_k": 3}, [3, 5, 6, 7, 8]),
        ({"keep_latest_k": 2, "save_top_k": 0}, [7, 8]),
        ({"save_last": True}, [3, 5, 8]),
        ({"save_last": True, "save_top_k": 0}, [8]),
    ],
)
def test_the_best_and_the_newest_are_kept(
    arguments: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    saver = each_step(tmp_path, **{"monitor": "score", "save_top_k": 2, **arguments})
    fit(saver, 8, model=Line((0.9, 0.8, 0.1, 0.7, 0.2, 0.3, 0.4, 0.5)))
    wanted = [f"step={step}.ckpt" for step in expected]
    if "save_last" in arguments:
        assert (tmp_path / "last.ckpt").readlink() == Path("step=8.ckpt")
        wanted.append("last.ckpt")
    assert names(tmp_path) == sorted(wanted)
    if arguments.get("save_top_k") != 0:
        assert saver.best_model_path == str(tmp_path / "step=3.ckpt")
        assert saver.best_model_score == pytest.approx(0.1)


class Checking(SingleFileCheckpointIO):
    """Looks at what `last.ckpt` names before anything is removed."""

    checked = 0

    def remove_checkpoint(self, path: str | Path) -> None:
        last = Path(path).with_name("last.ckpt")
        assert last.resolve() != Path(path)
        self.verify_checkpoint(last)
        self.checked += 1
        super().remove_checkpoint(path)


def test_last_link_always_names_an_existing_checkpoint(tmp_path: Path) -> None:
    io = Checking()
    fit(each_step(tmp_path, save_last=True), 5, plugins=io)
    assert io.checked == 4
    # It moves with its folder.
    moved = (tmp_path).rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert io.load_checkpoint(moved / "last.ckpt")["global_step"] == 5


def test_where_nothing_can_be_linked_last_is_saved_a_second_time(tmp_path: Path) -> None:
    class NoLinks(SingleFileCheckpointIO):
        def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
            return False

    fit(each_step(tmp_path, save_last=True), 3, plugins=NoLinks())
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt"]
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert NoLinks().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 3


class Fails(Callback):
    """Raises in the step after `step`, the first time that it comes by."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("in the user's code"), KeyboardInterrupt()])
def test_exception_checkpoint_is_removed_by_the_next_save(
    error: BaseException, tmp_path: Path
) -> None:
    def saver() -> ModelCheckpoint:
        return each_step(tmp_path, every_n_train_steps=4, save_on_exception=True)

    with (
        pytest.raises(type(error)),
        pytest.warns(UserWarning, match="saved within an optimizer step that an error has ended"),
    ):
        fit(saver(), 10, Fails(6, error))
    assert names(tmp_path) == ["exception-step=6.ckpt", "step=4.ckpt"]
    resumed = fit(saver(), 10, ckpt_path="last")
    assert resumed.first_step == 6
    assert names(tmp_path) == ["step=8.ckpt"]
    expected = fit(each_step(tmp_path / "expected"), 10)
    assert torch.equal(resumed.net.weight, expected.net.weight)


@pytest.mark.filterwarnings("ignore:this checkpoint is saved within an optimizer step")
def test_save_on_exception_failure_keeps_the_first_error(tmp_path: Path) -> None:
    class Full(SingleFileCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
            raise CheckpointSaveError("no space")

    saver = each_step(tmp_path, every_n_train_steps=100, save_on_exception=True)
    with (
        pytest.raises(ValueError, match="first"),
        pytest.warns(UserWarning, match=r"after ValueError\('first'\), saving failed: no space"),
    ):
        fit(saver, 10, Fails(6, ValueError("first")), plugins=Full())


def test_after_a_save_that_failed_the_best_is_one_that_is_there(tmp_path: Path) -> None:
    class FullAtLast(SingleFileCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
            if "step=3" in str(path):
                raise CheckpointSaveError("no space")
            super().save_checkpoint(checkpoint, path)

    saver = each_step(tmp_path, save_last=True)
    with pytest.raises(CheckpointSaveError, match="no space"):
        fit(saver, 10, plugins=FullAtLast())
    assert Path(saver.best_model_path) == tmp_path / "step=2.ckpt"
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        fit(each_step(tmp_path / "file"), 1)
    assert str(caught.value).startswith(
        f"ModelCheckpoint: dirpath='{tmp_path / 'file'}' is no folder that can be written to"
    )


# ---------------------------------------------------------------- the last one


def test_ckpt_path_last_skips_damaged_checkpoints_with_a_warning(
    tmp_path: Path,
) -> None:
    fit(each_step(tmp_path, save_top_k=-1, save_last=True), 6)
    # The newest is gone, so that `last.ckpt` leads nowhere; then a flipped bit; then half a file.
    (tmp_path / "step=6.ckpt").unlink()
    flipped = bytearray((tmp_path / "step=5.ckpt").read_bytes())
    flipped[1000] ^= 1
    (tmp_path / "step=5.ckpt").write_bytes(flipped)
    half = (tmp_path / "step=4.ckpt").read_bytes()
    (tmp_path / "step=4.ckpt").write_bytes(half[: len(half) // 2])
    for age, step in enumerate((5, 4, 3, 2, 1)):
        os.utime(tmp_path / f"step={step}.ckpt", (10**9 - age,) * 2)

    class Counting(SingleFileCheckpointIO):
        verified: list[str]

        def verify_checkpoint(self, path: str | Path) -> None:
            self.verified = [*getattr(self, "verified", []), Path(path).name]
            super().verify_checkpoint(path)

    io = Counting()
    with pytest.warns(UserWarning, match="was passed over") as caught:
        model = fit(each_step(tmp_path), 8, ckpt_path="last", plugins=io)
    assert model.first_step == 3
    assert io.verified == [f"step={step}.ckpt" for step in (6, 4, 5, 3)]
    told = [str(warning.message) for warning in caught]
    missing = str(tmp_path / "step=6.ckpt")
    assert told[0] == (
        f"ckpt_path='last': {missing!r} was passed over: no checkpoint {missing!r}; the folder "
        f"{str(tmp_path)!r} contains {', '.join(f'step={step}.ckpt' for step in range(1, 6))}"
    )
    assert re.fullmatch(r"ckpt_path='last': '.*step=4\.ckpt' was passed over: .*whole.*", told[1])
    assert re.fullmatch(r"ckpt_path='last': '.*step=5\.ckpt' was passed over: .*damaged.*", told[2])


def test_directory_checkpoints_keep_last_and_skip_damaged_ones(tmp_path: Path) -> None:
    saver = each_step(tmp_path, save_last=True, keep_latest_k=2)
    fit(saver, 4, plugins="directory")
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert (tmp_path / "last.ckpt").readlink() == Path("step=4.ckpt")
    damaged = tmp_path / "step=4.ckpt" / "state.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = each_step(tmp_path, save_last=True, keep_latest_k=2)
    with pytest.warns(UserWarning, match=r"step=4\.ckpt' was passed over: .*state\.ckpt.*damaged"):
        model = fit(again, 5, plugins="directory", ckpt_path="last")
    assert model.first_step == 3
    # The damaged one is not this run's to remove: step 3 does not know of it.
    assert names(tmp_path) == [
        "last.ckpt",
        "step=4-v1.ckpt",
        "step=4.ckpt",
        "step=5.ckpt",
    ]


def test_ckpt_path_last_raises_if_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nothing")
    with (
        pytest.raises(CheckpointNotFoundError) as caught,
        pytest.warns(UserWarning, match=r"a\.ckpt' was passed over"),
    ):
        fit(each_step(tmp_path), 8, ckpt_path="last")
    assert str(caught.value) == (
        f"ckpt_path='last': none of the 1 checkpoint(s) in {tmp_path} is whole"
    )


def test_last_is_the_highest_step_in_a_folder_that_was_copied_in_another_order(
    tmp_path: Path,
) -> None:
    fit(each_step(tmp_path / "run", save_top_k=-1), 11)
    # As by hand, so that neither names nor times tell the step.
    (tmp_path / "copy").mkdir()
    for age, step in enumerate(range(1, 12)):
        copy = tmp_path / "copy" / f"{11 - age}.ckpt"
        shutil.copyfile(tmp_path / "run" / f"step={step}.ckpt", copy)
        os.utime(copy, (10**9 - age,) * 2)
    assert fit(each_step(tmp_path / "copy"), 12, ckpt_path="last").first_step == 11


def test_last_names_the_checkpoint_of_another_run_that_saved_later(tmp_path: Path) -> None:
    fit(each_step(tmp_path, save_top_k=-1), 4)
    fit(each_step(tmp_path, save_top_k=-1, filename="later-{step}"), 2)
    with pytest.warns(UserWarning, match="Another run") as caught:
        assert fit(each_step(tmp_path), 5, ckpt_path="last").first_step == 4
    assert [str(each.message) for each in caught] == [
        f"ckpt_path='last': took {str(tmp_path / 'step=4.ckpt')!r}, which has the highest step. "
        f"Another run has saved {str(tmp_path / 'later-step=2.ckpt')!r} later, at step 2: to "
        "resume that run, pass this path. Give each run a folder of its own"
    ]


def test_an_interval_that_is_no_timedelta_is_refused() -> None:
    interval: Any = 0.1
    with pytest.raises(ConfigurationError) as caught:
        ModelCheckpoint(train_time_interval=interval)
    assert str(caught.value) == (
        "ModelCheckpoint(train_time_interval=0.1): expected a datetime.timedelta, such as "
        "timedelta(minutes=30)"
    )


def test_the_checkpoints_of_ones_own_run_go_before_newer_ones_of_another(tmp_path: Path) -> None:
    saver = each_step(tmp_path)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=3, callbacks=saver
    )
    trainer.fit(Line(), loader())
    fit(each_step(tmp_path, filename="other-{step}"), 7)
    again = Line()
    trainer.options = replace(trainer.options, max_steps=5)
    trainer.fit(again, loader(), ckpt_path="last")
    assert again.first_step == 3


# ---------------------------------------------------------------- weights that are not finite


class Breaks(Line):
    """Has a mask of infinities, and is NaN from the step after `healthy` steps on."""

    def __init__(self, healthy: int, scores: tuple[float, ...] = ()) -> None:
        super().__init__(scores)
        self.healthy = healthy
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.frozen = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step >= self.healthy else loss


BROKEN = (
    "step {}: the weights are not finite: 'net.weight' holds NaN or an infinity. Checkpoints "
    "with finite weights are kept; only the newest non-finite one is saved in addition. "
    "Trainer(detect_anomaly=True) finds where NaN begins"
)


@pytest.mark.parametrize("plugins", ["single_file", "directory"])
@pytest.mark.parametrize(
    ("arguments", "expected", "best", "last"),
    [
        ({}, [3, 6], 3, None),
        ({"save_top_k": 2, "save_last": True}, [2, 3, 6], 3, 3),
        ({"save_top_k": 0, "keep_latest_k": 2}, [2, 3, 6], None, None),
        ({"monitor": "score", "save_top_k": 2}, [2, 3, 6], 3, None),
        ({"save_top_k": -1}, [1, 2, 3, 4, 5, 6], 3, None),
    ],
)
def test_weights_that_are_not_finite_never_take_the_place_of_finite_ones(
    arguments: dict[str, Any],
    expected: list[int],
    best: int | None,
    last: int | None,
    plugins: str,
    tmp_path: Path,
) -> None:
    saver = each_step(tmp_path, **arguments)
    model = Breaks(3, (0.6, 0.5, 0.4, 0.3, 0.2, 0.1))
    with pytest.warns(UserWarning, match="not finite") as caught:
        fit(saver, 6, model=model, plugins=plugins)
    assert [str(warning.message) for warning in caught] == [BROKEN.format(4)]
    wanted = [f"step={step}.ckpt" for step in expected]
    assert names(tmp_path) == sorted(wanted + ["last.ckpt"] * (last is not None))
    assert saver.best_model_path == ("" if best is None else str(tmp_path / f"step={best}.ckpt"))
    if last is not None:
        assert (tmp_path / "last.ckpt").readlink() == Path(f"step={last}.ckpt")
    # What is resumed from is finite, which is said; what is finite by then takes the other's place.
    again = each_step(tmp_path, **arguments)
    with pytest.warns(UserWarning, match="passed over") as caught:
        fixed = fit(again, 4, model=Breaks(9, (0.0,) * 9), plugins=plugins, ckpt_path="last")
    assert fixed.first_step == 3
    passed_over = str(tmp_path / "step=6.ckpt")
    assert str(caught[0].message) == (
        f"ckpt_path='last': {passed_over!r} was passed over: its weights are not finite, such as "
        "'net.weight'"
    )
    assert torch.isfinite(fixed.net.weight).all()
    if best is not None:
        assert Path(again.best_model_path).stem == ("step=4-v1" if 4 in expected else "step=4")


def test_where_no_weights_are_finite_the_newest_are_there_to_resume_from(tmp_path: Path) -> None:
    saver = each_step(tmp_path)
    with pytest.warns(UserWarning, match="step 1: the weights are not finite"):
        fit(saver, 3, model=Breaks(0))
    assert names(tmp_path) == ["step=3.ckpt"]
    assert saver.best_model_path == ""
    again = each_step(tmp_path)
    with pytest.warns(UserWarning, match="step 4: the weights are not finite"):
        assert fit(again, 4, model=Breaks(0), ckpt_path="last").first_step == 3
    assert names(tmp_path) == ["step=4.ckpt"]


# ---------------------------------------------------------------- whose they are


def test_a_name_that_was_taken_ten_thousand_times_costs_one_listing(tmp_path: Path) -> None:
    (tmp_path / "step=1.ckpt").touch()
    for version in range(1, 10_000):
        (tmp_path / f"step=1-v{version}.ckpt").touch()
    (tmp_path / "step=1-v9000.ckpt").unlink()
    lite = Lite(accelerator="cpu")
    lite.launch()
    chosen = CheckpointNames()
    began = time.process_time()
    found = [Path(chosen.choose(lite.ranks, tmp_path, "step=1")).name for _ in range(4)]
    assert time.process_time() - began < 2
    # Each is claimed until something is there.
    assert found == ["step=1-v9000.ckpt", *(f"step=1-v{10_000 + n}.ckpt" for n in range(3))]
    chosen.release_all()


TWO_RUNS = (SCRIPTS / "checkpoint_policies_two_runs.py").read_text()


@pytest.mark.parametrize("locks", ["seen", "none", "unseen"])
def test_two_runs_in_one_folder_never_touch_each_others_files(
    locks: str, tmp_path: Path, script_environment: dict[str, str]
) -> None:
    """Whether or not the file system has locks, and each sees the other's."""
    (tmp_path / "script.py").write_text(TWO_RUNS)
    environment = {**script_environment, "TEST_LOCKS": locks, "PYTHONPATH": str(SCRIPTS)}
    runs = [
        subprocess.Popen(
            [sys.executable, "script.py", mark],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mark in ("first", "second")
    ]
    for _ in range(8):
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "at a step\n"
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("go\n")
            run.stdin.flush()
    kept = {}
    for run, mark in zip(runs, ("first", "second"), strict=True):
        said, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        kept[mark] = json.loads(said.removeprefix("kept ").replace("'", '"'))
    assert len({*kept["first"], *kept["second"]}) == 6
    assert names(tmp_path / "shared") == sorted(
        Path(path).name for paths in kept.values() for path in paths
    )
    assert {Path(path).name for paths in kept.values() for path in paths} == {
        *(f"step={step}{version}.ckpt" for step in (7, 8) for version in ("", "-v1")),
        "last.ckpt",
        "last-v1.ckpt",
    }
    for mark, paths in kept.items():
        for path in paths:
            loaded = SingleFileCheckpointIO().load_checkpoint(tmp_path / path)
            assert loaded["hyper_parameters"]["mark"] == mark


def test_of_two_runs_that_resume_from_one_checkpoint_one_moves_last(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    last = str(tmp_path / "last.ckpt")
    first, second = CheckpointNames(), CheckpointNames()
    assert first.may_move(lite.ranks, last)
    assert not second.may_move(lite.ranks, last)
    first.release_all()
    assert second.may_move(lite.ranks, last)
    second.release_all()
    assert names(tmp_path) == []


def test_the_claim_of_a_process_that_was_killed_is_void(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    program = (
        "import sys, time\n"
        "from stratagem.storage.claims import claim\n"
        "claimed = [claim(path) for path in sys.argv[1:]]\n"
        "print('claimed', flush=True)\n"
        "time.sleep(600)\n"
    )
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(other)],
        env=script_environment,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    owner.stdout.readline()
    assert claim(path) is None
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    mine = claim(path)
    assert mine is not None
    assert [name for name in names(tmp_path) if "other" in name] == []
    mine.release()
    assert names(tmp_path) == []


@pytest.mark.parametrize("how", ["where it was", "moved", "copied"])
def test_resumed_run_removes_its_own_moved_or_copied_checkpoints(how: str, tmp_path: Path) -> None:
    def saver(folder: Path) -> ModelCheckpoint:
        return each_step(folder, monitor="score", save_top_k=2, save_last=True)

    before, after = tmp_path / "before", tmp_path / "after"
    scores = (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    fit(saver(before), 3, model=Line(scores))
    if how == "moved":
        before.rename(after)
    elif how == "copied":
        shutil.copytree(before, after, symlinks=True)
    else:
        after = before
    second = saver(after)
    model = fit(second, 5, model=Line(scores), ckpt_path="last")
    assert model.first_step == 3
    assert names(after) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert second.last_model_path == str(after / "last.ckpt")
    if how == "copied":
        assert names(before) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]


@pytest.mark.parametrize("named", ["step=3.ckpt", "last.ckpt", "by another folder"])
def test_a_checkpoint_that_was_named_to_resume_from_is_kept(named: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    fit(each_step(folder, save_last=True), 3)
    other.symlink_to(folder)
    path = folder / named if named.endswith(".ckpt") else other / "step=3.ckpt"
    for _ in range(2):  # the same command once more
        model = fit(each_step(folder, save_last=named == "last.ckpt"), 5, ckpt_path=path)
        assert "step=3.ckpt" in names(folder)
        assert path.exists()
    assert model.first_step == (5 if named == "last.ckpt" else 3) or model.first_step is None
    assert "step=4.ckpt" not in names(folder)


def test_a_run_that_resumes_into_another_runs_folder_leaves_that_ones_files(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fit(each_step(there, save_last=True), 3)
    whose = (there / "step=3.ckpt").read_bytes()
    fit(each_step(here, save_last=True), 3)
    saver = each_step(there, save_last=True)
    fit(saver, 5, ckpt_path=here / "last.ckpt")
    assert (there / "step=3.ckpt").read_bytes() == whose
    assert names(there) == ["last-v1.ckpt", "last.ckpt", "step=3.ckpt", "step=5.ckpt"]
    assert (there / "last.ckpt").readlink() == Path("step=3.ckpt")
    # Of the run that it resumes it removes what is not kept, but for what `last` names there.
    assert names(here) == ["last.ckpt", "step=3.ckpt"]


def test_callbacks_that_differ_in_any_argument_have_states_of_their_own(tmp_path: Path) -> None:
    def savers(folder: Path) -> list[ModelCheckpoint]:
        return [
            each_step(folder / "a"),
            each_step(folder / "b"),
            each_step(folder / "b", filename="top-{step}", save_top_k=3),
        ]

    first = savers(tmp_path)
    fit(first[0], 2, *first[1:])
    assert len({saver.state_key for saver in first}) == 3
    again = savers(tmp_path)
    # The one that was saved last knows of the others.
    fit(again[0], 3, *again[1:], ckpt_path=tmp_path / "b" / "top-step=2.ckpt")
    assert names(tmp_path / "a") == ["step=3.ckpt"]
    assert names(tmp_path / "b") == [
        "step=3.ckpt",
        *(f"top-step={step}.ckpt" for step in (1, 2, 3)),
    ]


# ---------------------------------------------------------------- what calls for a save


class Validated(Line):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0 + self.current_epoch)


def fit_epochs(saver: ModelCheckpoint, epochs: int, *, validates: bool = True) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=epochs,
        limit_train_batches=2,
        callbacks=saver,
    )
    trainer.fit(Validated(), loader(), loader() if validates else None)


def test_every_n_train_steps_waits_for_the_monitored_value(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", every_n_train_steps=1)
    with pytest.warns(UserWarning, match=r"step 1: .*monitor='val_loss'.*there is no"):
        fit_epochs(saver, 2)
    # With the value of these very weights, which is the smaller one.
    assert names(tmp_path) == ["step=2.ckpt"]
    assert (saver.best_model_score, saver.current_score) == (1.0, 2.0)
    never = ModelCheckpoint(tmp_path / "never", monitor="loss", every_n_train_steps=1)
    with (
        pytest.warns(UserWarning, match="no value yet.*Saves are deferred until it is logged"),
        pytest.raises(UserCodeError, match=r"ModelCheckpoint\(monitor='loss'\): no value of"),
    ):
        fit_epochs(never, 2)


def test_a_save_of_the_newest_that_has_no_value_yet_warns_of_nothing(tmp_path: Path) -> None:
    # In tests a warning is an error.
    saver = ModelCheckpoint(
        tmp_path, "{step}", monitor="val_loss", every_n_train_steps=1, save_last=True
    )
    fit_epochs(saver, 1)
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt"]


def test_save_on_train_epoch_end_false_saves_without_validation(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    fit_epochs(saver, 2, validates=False)
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_zero_steps_or_epochs_mean_not_by_them(tmp_path: Path) -> None:
    by_epoch = ModelCheckpoint(
        tmp_path / "epochs", "{step}", every_n_train_steps=0, every_n_epochs=1, save_top_k=-1
    )
    fit_epochs(by_epoch, 2)
    assert names(tmp_path / "epochs") == ["step=2.ckpt", "step=4.ckpt"]
    by_step = ModelCheckpoint(
        tmp_path / "steps", "{step}", every_n_train_steps=3, every_n_epochs=0, save_top_k=-1
    )
    fit_epochs(by_step, 2)
    assert names(tmp_path / "steps") == ["step=3.ckpt"]
    fit_epochs(ModelCheckpoint(tmp_path / "never", every_n_epochs=0), 2)
    assert not (tmp_path / "never").exists() or names(tmp_path / "never") == []


@pytest.mark.parametrize("monitor", ["epoch", "step"])
def test_the_epoch_and_the_step_may_be_monitored(monitor: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor=monitor, mode="max", save_top_k=2)
    fit_epochs(saver, 3)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert saver.best_model_score == {"epoch": 2.0, "step": 6.0}[monitor]


@pytest.mark.parametrize("monitor", ["epoch", "step"])
def test_a_fit_that_ends_before_its_validation_saves_by_the_epoch_and_the_step(
    monitor: str, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", monitor=monitor)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=1, callbacks=saver
    )
    trainer.fit(Validated(), loader(), loader())
    assert names(tmp_path) == ["step=1.ckpt"]


def test_epoch_without_validation_saves_no_best_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="epoch", save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=4,
        check_val_every_n_epoch=2,
        callbacks=saver,
    )
    trainer.fit(Validated(), loader(), loader())
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt"]


class Rare(Line):
    """A Line that logs a value in each epoch of training, and one in each validation."""

    def on_train_epoch_end(self) -> None:
        self.log("trained", 5.0 - self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", float(self.current_epoch))


def fit_rarely_validated(
    saver: ModelCheckpoint, ckpt_path: str | None = None, epochs: int = 5
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=epochs,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        callbacks=saver,
    )
    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    trainer.fit(Rare(), data, data, ckpt_path=ckpt_path)


@pytest.mark.parametrize("at_epoch_end", [None, True])
@pytest.mark.parametrize(("top_k", "best"), [(-1, [0, 1, 2, 3, 4]), (1, [4]), (2, [3, 4])], ids=str)
def test_a_value_of_training_is_judged_in_epochs_without_validation(
    at_epoch_end: bool | None, top_k: int, best: list[int], tmp_path: Path
) -> None:
    for save_last in (False, True):
        folder = tmp_path / str(save_last)

        def make() -> ModelCheckpoint:
            options: dict[str, Any] = {"save_top_k": top_k, "save_last": save_last}  # noqa: B023
            options["save_on_train_epoch_end"] = at_epoch_end
            return ModelCheckpoint(folder, "{epoch}", monitor="trained", **options)  # noqa: B023

        fit_rarely_validated(saver := make())
        epochs = [f"epoch={epoch}.ckpt" for epoch in best]
        assert names(folder) == epochs + ["last.ckpt"] * save_last
        assert saver.best_model_score == 1.0
        fit_rarely_validated(saver := make(), str(folder / "epoch=4.ckpt"), 7)
        assert saver.best_model_score == -1.0
        assert Path(saver.best_model_path).name == "epoch=6.ckpt"


@pytest.mark.parametrize(
    "saves",
    [{}, {"every_n_train_steps": 1}, {"train_time_interval": timedelta(0)}],
    ids=lambda saves: next(iter(saves), "epochs"),
)
def test_checkpoint_filename_has_none_before_the_first_value(
    saves: dict[str, Any], tmp_path: Path
) -> None:
    name, told = "{step}-{validated:.1f}", "'validated' was not logged yet. Names of checkpoints"
    by_epochs = ["step=2-validated=none", "step=4-validated=1.0", "step=6-validated=1.0"]
    by_steps = [
        *("step=1-validated=none", "step=2-validated=none", "step=3-validated=none"),
        *("step=4-validated=none", "step=5-validated=1.0", "step=6-validated=1.0"),
    ]
    every = by_steps if saves else by_epochs
    for top_k, save_last in itertools.product((-1, 1, 2), (False, True)):
        folder = tmp_path / f"{top_k}{save_last}"

        def make() -> ModelCheckpoint:
            options: dict[str, Any] = {"save_top_k": top_k, "save_last": save_last}  # noqa: B023
            return ModelCheckpoint(folder, name, **options, **saves)  # noqa: B023

        with pytest.warns(UserWarning, match=told) as caught:
            fit_rarely_validated(make(), epochs=3)
        assert len(caught) == 1
        kept = [f"{one}.ckpt" for one in (every if top_k == -1 else every[-top_k:])]
        assert names(folder) == ["last.ckpt"] * save_last + kept
        fit_rarely_validated(make(), str(folder / kept[-1]), epochs=4)
        assert f"step=8-validated={1.0 if saves else 3.0}.ckpt" in names(folder)


def test_save_last_accepts_link(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_last="link")
    fit_epochs(saver, 1)
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=0.ckpt")
    assert ModelCheckpoint(save_last=None).save_last is False


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    saver = ModelCheckpoint("~/saved", "{epoch}")
    fit_epochs(saver, 1)
    assert saver.dirpath == tmp_path / "home" / "saved"
    trainer = Trainer(accelerator="cpu", default_root_dir="~/runs", logger=CSVLogger("~/logs"))
    assert trainer.options.default_root_dir == tmp_path / "home" / "runs"
    assert Validated.load_from_checkpoint("~/saved/epoch=0.ckpt").scores == ()
    trainer.validate(Validated(), loader(), ckpt_path="~/saved/epoch=0.ckpt", verbose=False)
    trainer.save_checkpoint("~/again.ckpt")
    lite = Lite(accelerator="cpu")
    lite.launch()
    assert lite.load("~/again.ckpt")["epoch"] == 0
    assert names(tmp_path) == ["home"]
    assert names(tmp_path / "home") == ["again.ckpt", "logs", "saved"]
    with pytest.raises(ConfigurationError, match=r"'~no-such-user/x': .*write the folder out"):
        ModelCheckpoint("~no-such-user/x")


# ---------------------------------------------------------------- two ranks

TWO_RANKS = (SCRIPTS / "checkpoint_policies_two_ranks.py").read_text()


@pytest.mark.slow
def test_ranks_save_after_the_same_steps_by_time_and_agree_on_the_last(
    run_script: RunScript, tmp_path: Path
) -> None:
    run_script(TWO_RANKS)
    seen = [eval((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    steps, free, count, texts, first, over, verified = seen[0]
    # 100 steps of 0.1 s: a save every 2 s, and up to 0.6 s later.
    assert 4 <= len(steps) <= 5
    assert all(20 <= b - a <= 26 for a, b in itertools.pairwise(steps))
    # The other steps ask nobody for the time.
    assert free == count - len(steps)
    assert texts == [
        "ModelCheckpoint(save_on_exception=True) saves nothing with 2 ranks: when an error or "
        "Ctrl-C ends one, the others are elsewhere. SIGTERM saves in any case; train_time_interval "
        "limits what an error costs"
    ]
    # Rank 0 looks for the last one, and says what it has passed over.
    assert (first, over) == (steps[-2], 1)
    assert verified == [f"step={steps[-1]}.ckpt", f"step={steps[-2]}.ckpt"]
    assert seen[1] == (steps, free, count, [], first, 0, [])


NONFINITE = (SCRIPTS / "checkpoint_policies_nonfinite.py").read_text()


@pytest.mark.parametrize(("strategy", "plugins"), [("ddp", "single_file"), ("fsdp", "directory")])
def test_nonfinite_weights_on_one_rank_warn_once_and_keep_last_on_all(
    strategy: str, plugins: str, run_script: RunScript, tmp_path: Path
) -> None:
    run_script(NONFINITE, strategy, plugins)
    seen = [eval((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    told = BROKEN.replace("net.weight", "net.1.weight").format(3)
    kept = ["step=2.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert seen == [([told], kept), ([], kept)]
    assert (tmp_path / "run" / "last.ckpt").readlink() == Path("step=2.ckpt")
