"""Restarts: a run that the cluster starts again goes on from its last checkpoint by itself."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.environments import PlainEnvironment
from stratagem.errors import ConfigurationError
from stratagem_torch.launch import restarts

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


class Cluster(PlainEnvironment):
    """A cluster that says what it is told to."""

    def __init__(self, *, count: int = 0, agent: str | None = None, run: str | None = "7") -> None:
        self.said = run, count, agent

    def run_id(self) -> str | None:
        return self.said[0]

    def restart_count(self) -> int:
        return self.said[1]

    def agent_id(self) -> str | None:
        return self.said[2]


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Killed(Callback):
    """Ends the run after so many steps, as a killed process does: nothing is told."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.first: int | None = None

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        if self.first is None:
            self.first = trainer.global_step
        if trainer.global_step == self.after:
            raise KeyboardInterrupt


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 3, generator=generator)), batch_size=4)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fits of a test are counted as those of a process of its own."""
    monkeypatch.setattr(restarts, "_fits", itertools.count())


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Net, int | None]]:
    """Run a script that fits for 2 epochs of 8 steps, saving every 3; return what it trained.

    And the step at which it began. `killed_after` ends it at that step.
    """

    def run(
        cluster: Cluster, *, killed_after: int = -1, fits: int = 1, ckpt_path: Path | None = None
    ) -> tuple[Net, int | None]:
        monkeypatch.setattr(restarts, "_fits", itertools.count())
        for number in range(fits):
            # The last fit of the script is the one that is ended.
            killed = Killed(killed_after if number == fits - 1 else -1)
            net = Net()
            trainer = Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=2,
                plugins=cluster,
                callbacks=[ModelCheckpoint(every_n_train_steps=3), killed],
                default_root_dir=tmp_path,
                enable_progress_bar=False,
            )
            if killed.after == -1:
                trainer.fit(net, loader(), ckpt_path=ckpt_path)
            else:
                with pytest.raises(KeyboardInterrupt):
                    trainer.fit(net, loader(), ckpt_path=ckpt_path)
        return net, killed.first

    return run


Fit = Callable[..., tuple[Net, int | None]]


def test_a_run_that_is_started_again_ends_as_one_that_was_never_interrupted(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = fit(Cluster(run=None))
    fit(Cluster(), killed_after=5)
    fit(Cluster(count=1), killed_after=11)
    capsys.readouterr()
    net, began_at = fit(Cluster(count=2))
    assert began_at == 9
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=0, atol=0)
    said = capsys.readouterr().err
    assert said.startswith("stratagem: the run '7' was started again: resuming from '")
    assert said.count("\n") == 1
    assert "epoch=1-step=9.ckpt" in said


def test_a_run_that_is_not_started_again_begins_anew_whatever_was_there(fit: Fit) -> None:
    fit(Cluster(), killed_after=5)
    assert fit(Cluster(), killed_after=2)[1] == 0
    # And a restart of that one, which has saved nothing, does not go on from the first.
    assert fit(Cluster(count=1))[1] == 0


def test_a_run_of_another_id_is_another_run(fit: Fit) -> None:
    fit(Cluster(run="7"), killed_after=5)
    assert fit(Cluster(run="8", count=1))[1] == 0


def test_without_a_cluster_nothing_is_kept(fit: Fit, tmp_path: Path) -> None:
    fit(Cluster(run=None))
    assert not (tmp_path / ".stratagem").exists()


def test_nodes_that_join_or_leave_count_as_a_restart(fit: Fit) -> None:
    """torchrun then starts the ranks anew with the restart count as it was."""
    fit(Cluster(agent="node1:/tmp/none_a"), killed_after=5)
    assert fit(Cluster(agent="node1:/tmp/none_a"))[1] == 3


def test_an_id_that_is_used_again_is_another_run_and_says_how_to_go_on(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun calls every run "none", unless it is told."""
    fit(Cluster(run="none", agent="node1:/tmp/none_a"), killed_after=5)
    capsys.readouterr()
    assert fit(Cluster(run="none", agent="node1:/tmp/none_b", count=1))[1] == 0
    said = capsys.readouterr().err
    assert "the run 'none' is not the earlier run of that id" in said
    assert "To go on from the earlier one, pass ckpt_path='" in said


def test_each_fit_of_a_script_goes_on_from_its_own_checkpoint(fit: Fit) -> None:
    fit(Cluster(), fits=2, killed_after=5)
    assert fit(Cluster(count=1), fits=2, killed_after=11)[1] == 3
    # The first had come to its end, after the checkpoint of step 15.
    assert fit(Cluster(count=2), fits=1)[1] == 15


def test_a_checkpoint_that_is_gone_is_passed_over(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Cluster(), killed_after=5)
    (record,) = (tmp_path / ".stratagem").glob("*.json")
    kept = json.loads(record.read_text())
    gone = str(tmp_path / "gone.ckpt")
    record.write_text(json.dumps({**kept, "checkpoints": [gone, *kept["checkpoints"]]}))
    capsys.readouterr()
    assert fit(Cluster(count=1), killed_after=5)[1] == 3
    assert f"the run '7' has saved {gone!r}, which is gone" in capsys.readouterr().err


def test_a_checkpoint_that_is_damaged_is_passed_over(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Cluster(), killed_after=5)
    fit(Cluster(count=1), killed_after=8)
    (record,) = (tmp_path / ".stratagem").glob("*.json")
    newest, before = map(Path, json.loads(record.read_text())["checkpoints"])
    # Removed by ModelCheckpoint, when the newest was there.
    before.write_bytes(newest.read_bytes())
    newest.write_bytes(newest.read_bytes()[:-100])
    capsys.readouterr()
    assert fit(Cluster(count=2), killed_after=8)[1] == 6
    said = capsys.readouterr().err
    assert f"has saved what cannot be used: {str(newest)!r} was passed over: " in said
    assert f"resuming from {str(before)!r}" in said


def test_restart_without_checkpoints_begins_anew_with_a_message(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Cluster(), killed_after=5)
    for checkpoint in tmp_path.rglob("*.ckpt"):
        checkpoint.unlink()
    capsys.readouterr()
    assert fit(Cluster(count=1))[1] == 0
    said = capsys.readouterr().err
    assert "step=3.ckpt', which is gone" in said
    assert "the run '7' was started again and has no checkpoint to go on from" in said


def test_restart_prefers_the_saved_checkpoint_to_ckpt_path(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Cluster(run="first"), killed_after=4)
    (checkpoint,) = tmp_path.rglob("*step=3.ckpt")
    fit(Cluster(), killed_after=8)
    capsys.readouterr()
    begun = fit(Cluster(count=1), ckpt_path=checkpoint)[1]
    assert begun is not None
    assert begun > 3
    said = capsys.readouterr().err
    assert f", in the place of ckpt_path={str(checkpoint)!r}" in said


def test_a_run_that_saves_nothing_leaves_nothing(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=Cluster(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Net(), loader())
    assert list(tmp_path.iterdir()) == []
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".stratagem", "own.ckpt"]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=Cluster(),
        logger=False,
        callbacks=ModelCheckpoint(tmp_path / "elsewhere"),
        enable_progress_bar=False,
        default_root_dir=tmp_path / "file",
    )
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Net(), loader())
    assert "the run '7' may be started again by the cluster" in str(caught.value)
    assert "Pass a default_root_dir that can be written" in str(caught.value)


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b'{"agents": [], "check',
        b"[]",
        b'{"run": "7"}',
        b'{"agents": 1, "checkpoints": []}',
        b'{"agents": [], "checkpoints": [1]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "keys", "agents", "checkpoints", "no text", "deep"],
)
def test_unreadable_restart_record_counts_as_empty(
    left: bytes, fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Cluster(), killed_after=4)
    (record,) = (tmp_path / ".stratagem").glob("*.json")
    record.write_bytes(left)
    capsys.readouterr()
    assert fit(Cluster(count=1), killed_after=4)[1] == 0
    said = capsys.readouterr().err
    assert f"has kept where its checkpoints are in {str(record)!r}, which cannot be read (" in said
    assert "and is taken as empty" in said
    assert "has no checkpoint to go on from: it begins anew" in said
    # It has been written anew, and the next restart goes on.
    assert json.loads(record.read_bytes())["run"] == "7"
    assert fit(Cluster(count=2))[1] == 3


SCRIPT = (SCRIPTS / "restarts.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_after_a_rank_was_killed_within_a_step_training_goes_on_bit_for_bit(
    strategy: str, run_script: RunScript, tmp_path: Path
) -> None:
    run_script(SCRIPT, strategy, "expected")
    done = run_script(
        SCRIPT,
        strategy,
        "restarted",
        "kill",
        before=("-m", "stratagem", "run", "--devices=2", "--max-restarts=1"),
        env={"PYTHONPATH": ""},
    )
    assert "was started again: resuming from" in done.stderr
    # Steps of 3, 3 and 2 batches in each epoch; it was killed in the second epoch's second.
    assert "step=4.ckpt" in done.stderr
    for rank in range(2):
        _, losses = json.loads((tmp_path / f"expected-{rank}.json").read_text())
        first, rest = json.loads((tmp_path / f"restarted-{rank}.json").read_text())
        assert first == 4
        assert rest == losses[8 + 3 :]
    restarted, expected = (
        torch.load(tmp_path / name, weights_only=True)["state_dict"]
        for name in ("restarted.ckpt", "expected.ckpt")
    )
    torch.testing.assert_close(restarted, expected, rtol=0, atol=0)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in done.stderr


def test_torchrun_without_a_store_of_its_own_is_advised(run_script: RunScript) -> None:
    text = """
    from stratagem import Lite
    Lite(accelerator="cpu", strategy="ddp", devices=1)
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=2")
    done = run_script(text, before=torchrun)
    assert done.stderr.count("Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun") == 1
