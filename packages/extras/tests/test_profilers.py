"""Profilers name what takes the time of a run."""

from __future__ import annotations

import json
import pstats
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled_runs import Net, loader, trainer
from torch import Tensor

from stratagem.callbacks import LambdaCallback
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.profilers import Profiler
from stratagem_extras.profilers.advanced import AdvancedProfiler
from stratagem_extras.profilers.pytorch import PyTorchProfiler
from stratagem_extras.profilers.simple import SimpleProfiler


class Forwards(Net):
    def forward(self, batch: Tensor) -> Any:
        return self.layer(batch)


class Kept(SimpleProfiler):
    """Keeps what was measured beyond the run."""

    def teardown(self, stage: str | None = None) -> None:
        self.calls = {name: len(taken) for name, taken in self.recorded_durations.items()}
        self.left = dict(self.current_actions)
        super().teardown(stage)


def test_durations_stay_after_a_run_and_each_report_is_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = trainer("simple")
    one.fit(Net(), loader())
    one.validate(Net(), loader(), verbose=False)
    action, profiler = "train_dataloader_next", one.profiler
    assert isinstance(profiler, SimpleProfiler)
    assert len(profiler.recorded_durations[action]) == 6
    assert len(profiler.recorded_durations["val_next"]) == 6
    one.predict(Forwards(), loader())
    assert len(profiler.recorded_durations["predict_next"]) == 6
    fit, _, validate = capsys.readouterr().out.partition("VALIDATE Profiler Report")
    assert action in fit
    assert action not in validate
    assert SimpleProfiler().summary() == ""


def test_actions_have_the_names_that_users_know(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Kept()
    callback = LambdaCallback(on_train_epoch_end=lambda trainer, module: None)
    one = trainer(profiler, accumulate_grad_batches=2, callbacks=callback, num_sanity_val_steps=0)
    one.fit(Net(), loader(), loader())
    assert profiler.left == {}
    of_strategy = "[Strategy]SingleDeviceStrategy"
    expected = {
        "run_training_epoch": 1,
        "run_training_batch": 3,
        f"{of_strategy}.training_step": 6,
        f"{of_strategy}.backward": 6,
        f"{of_strategy}.optimizer_step": 3,
        f"{of_strategy}.validation_step": 6,
        "train_dataloader_next": 6,
        "val_next": 6,
        "[Module]Net.on_train_start": 1,
        "[Callback]LambdaCallback.on_train_epoch_end": 1,
        "my own": 6,
    }
    assert {name: profiler.calls.get(name) for name in expected} == expected
    printed = capsys.readouterr().out
    assert printed.startswith("FIT Profiler Report")
    assert "| run_training_epoch" in printed
    assert "Percentage %" in printed


def test_a_run_that_fails_is_reported_too(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise ValueError("no")

    profiler = Kept()
    with pytest.raises(ValueError, match="no"):
        trainer(profiler).fit(Fails(), loader())
    assert profiler.calls["run_training_batch"] == 1
    assert "FIT Profiler Report" in capsys.readouterr().out


def test_a_report_goes_to_a_file_of_each_rank_and_stage(tmp_path: Path) -> None:
    profiler = SimpleProfiler(tmp_path / "reports", "mine", extended=False)
    one = trainer(profiler)
    one.fit(Net(), loader())
    one.validate(Net(), loader(), verbose=False)
    names = sorted(path.name for path in (tmp_path / "reports").iterdir())
    assert names == ["fit-mine.txt", "validate-mine.txt"]
    text = (tmp_path / "reports" / names[1]).read_text()
    assert "validation_step" in text
    assert "training_step" not in text
    assert "Percentage" not in text


def test_a_report_lies_beside_the_logs_of_its_run_unless_a_folder_is_given(tmp_path: Path) -> None:
    free, given = SimpleProfiler(filename="a"), SimpleProfiler(tmp_path, "a")
    for run in ("first", "second"):
        for profiler in (free, given):
            profiler.setup("fit", None, str(tmp_path / run))
        assert free.path_of(".txt") == tmp_path / run / "fit-a.txt"
        assert given.path_of(".txt") == tmp_path / "fit-a.txt"


def test_functions_are_found_within_actions_that_lie_within_others(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "deep", dump_stats=True)
    trainer(profiler).fit(Net(), loader())
    report = (tmp_path / "fit-deep.txt").read_text()
    assert "Profile stats for: run_training_epoch" in report
    assert "Profile stats for: [Strategy]SingleDeviceStrategy.backward" in report
    stats: Any = pstats.Stats(str(tmp_path / "fit-run_training_epoch-deep.prof"))
    with profiler.profile("sort"):
        sorted(range(9))
    assert any(
        "sorted" in str(entry.code) for entry in profiler.profiled_actions["sort"].getstats()
    )
    functions = {name for _, _, name in stats.stats}
    assert {"training_step", "<built-in method torch._C._nn.linear>"} <= functions


def test_torchs_profiler_has_the_actions_as_ranges(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "torch", row_limit=-1)
    trainer(profiler).fit(Net(), loader())
    assert "aten::linear" in (tmp_path / "fit-torch.txt").read_text()
    trace = json.loads((tmp_path / "fit-trace-0-torch.pt.trace.json").read_text())
    ranges = {event.get("name") for event in trace["traceEvents"]}
    assert "[PyTorchProfiler][profile][Strategy]SingleDeviceStrategy.training_step" in ranges
    with pytest.raises(ConfigurationError, match=r"PyTorchProfiler\(.*shape"):
        trainer(PyTorchProfiler(shapes=True)).fit(Net(), loader())


def test_pytorch_profiler_refuses_unknown_table_kwargs() -> None:
    with pytest.raises(ConfigurationError, match=r"'max_width'.*expected some of header, max_"):
        PyTorchProfiler(table_kwargs={"max_width": 3})
    with pytest.raises(ConfigurationError, match="row_limit and sort_by_key are arguments"):
        PyTorchProfiler(table_kwargs={"row_limit": 3})


def test_a_trace_handler_of_torch_writes_the_trace(tmp_path: Path) -> None:
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path / "traces"))
    trainer(PyTorchProfiler(on_trace_ready=handler)).fit(Net(), loader())
    (trace,) = (tmp_path / "traces").iterdir()
    assert "aten::linear" in trace.read_text()


def test_profilers_are_given_by_name() -> None:
    kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    for name, kind in kinds.items():
        assert type(trainer(name).profiler) is kind


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_actions_that_do_not_match_are_refused(kind: type[Profiler]) -> None:
    with pytest.raises(UserCodeError, match="'sleep' ends, which has not begun"):
        kind().stop("sleep")
    profiler = SimpleProfiler()
    profiler.start("sleep")
    with pytest.raises(UserCodeError, match="while it runs already"):
        profiler.start("sleep")
