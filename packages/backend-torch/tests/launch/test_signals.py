"""A signal in any part of a fit ends it in order, or reaches the former handler."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.launch.rank import this_rank

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


class Line(Module):
    """A line whose steps are noted in `steps`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(self.global_step)
        loss: Tensor = (self.net(batch[0]) - 1).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.net(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class SignalIn(Callback):
    """Sends SIGTERM to this process in a hook, in an epoch."""

    def __init__(self, hook: str, epoch: int) -> None:
        self.sent = False

        def send(trainer: Trainer, *_: Any) -> None:
            if trainer.current_epoch >= epoch and not self.sent:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)

        setattr(self, hook, send)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), 2, shuffle=True)


def trainer_in(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=3,
        callbacks=[*callbacks, ModelCheckpoint(folder, every_n_epochs=9)],
        **arguments,
    )


@pytest.mark.parametrize("hook", ["on_validation_batch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_signal_at_the_end_of_an_epoch_ends_the_fit_before_the_next_step(
    hook: str, epoch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, Any] = {"num_sanity_val_steps": 0}
    trainer_in(tmp_path / "whole", **arguments).fit(whole := Line(), data(), data())
    model, callback = Line(), SignalIn(hook, epoch)
    with pytest.raises(SystemExit) as ended:
        trainer_in(tmp_path, callback, **arguments).fit(model, data(), data())
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    steps = 4 * (epoch + 1)
    assert model.steps == [*range(steps)]
    (saved,) = tmp_path.glob("*.ckpt")
    assert saved.name == f"interrupted-step={steps}.ckpt"
    assert f"SIGTERM: training ends here, saved as {saved}" in capsys.readouterr().out
    trainer_in(tmp_path, **arguments).fit(resumed := Line(), data(), data(), ckpt_path=saved)
    assert resumed.steps == [*range(steps, 12)]
    assert torch.equal(resumed.net.weight, whole.net.weight)


def test_a_signal_in_the_sanity_check_ends_the_fit_after_the_first_step(tmp_path: Path) -> None:
    callback, model = SignalIn("on_validation_batch_start", 0), Line()
    with pytest.raises(SystemExit):
        trainer_in(tmp_path, callback).fit(model, data(), data())
    assert model.steps == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted-step=1.ckpt"]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Install a handler that Stratagem may replace; it notes that it was called."""
    calls: list[str] = []

    def handler(*_: Any) -> None:
        calls.append("received")

    monkeypatch.setattr(this_rank, "handlers", {handler})
    before = signal.signal(signal.SIGTERM, handler)
    yield calls
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_a_signal_after_the_last_check_reaches_the_former_handler_when_the_fit_ends(
    hook: str, tmp_path: Path, received: list[str]
) -> None:
    class Last(Callback):
        def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
            received.append("torn down")

    trainer = trainer_in(tmp_path, SignalIn(hook, 0), Last())
    trainer.fit(Line(), data(), data())
    assert received == ["torn down", "received"]
    trainer.fit(Line(), data(), data())
    assert received == ["torn down", "received", "torn down"]


def test_a_signal_before_an_error_reaches_the_former_handler_after_the_traceback(
    tmp_path: Path, received: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Callback):
        def on_validation_end(self, trainer: Trainer, module: Module) -> None:
            if not trainer.sanity_checking:
                signal.raise_signal(signal.SIGTERM)
                raise ValueError("fails here")

    with pytest.raises(ValueError, match="fails here"):
        trainer_in(tmp_path, Fails()).fit(Line(), data(), data())
    assert received == ["received"]
    assert "ValueError: fails here" in capsys.readouterr().err


def test_an_evaluation_does_not_handle_signals(tmp_path: Path, received: list[str]) -> None:
    class Looks(Callback):
        def on_predict_batch_end(self, *_: Any) -> None:
            received.append("goes on")

    trainer = trainer_in(tmp_path, SignalIn("on_predict_batch_start", 0), Looks())
    trainer.predict(Line(), data(), return_predictions=False)
    assert received == ["received", *["goes on"] * 4]


def test_a_handler_that_a_hook_sets_stays_after_the_fit(
    tmp_path: Path, received: list[str]
) -> None:
    def own(*_: Any) -> None:
        received.append("own")

    class Sets(Callback):
        def on_train_start(self, trainer: Trainer, module: Module) -> None:
            self.before = signal.signal(signal.SIGTERM, own)

    trainer_in(tmp_path, sets := Sets(), SignalIn("on_train_epoch_end", 1)).fit(Line(), data())
    assert received == ["own"]
    assert signal.signal(signal.SIGTERM, next(iter(this_rank.handlers))) is own
    assert sets.before is not own


def test_ranks_end_together_by_a_signal_in_the_last_validation(
    run_script: RunScript, tmp_path: Path
) -> None:
    script = (SCRIPTS / "signals.py").read_text()
    finished = run_script(script, expect=128 + signal.SIGTERM)
    assert "NOT REACHED" not in finished.stdout
    assert "SIGTERM: training ends here, saved as" in finished.stdout
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["interrupted-step=8.ckpt"]
