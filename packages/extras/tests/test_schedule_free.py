"""ScheduleFree: the numbers of a loop that calls the modes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.callbacks import EMAWeightAveraging
from stratagem.checkpoint import DirectoryCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem_extras.callbacks.schedule_free import ScheduleFree

schedulefree: Any = pytest.importorskip("schedulefree")

SCRIPT = Path(__file__).parent / "scripts" / "schedule_free.py"


def weights(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        read: Any = DirectoryCheckpointIO().load_checkpoint(path)
    else:
        read = torch.load(path, weights_only=True)
    state: dict[str, torch.Tensor] = read["state_dict"]
    return state


@pytest.mark.parametrize(("name", "ranks"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_fit_and_a_resumed_fit_have_the_numbers_of_a_loop(
    name: str, ranks: int, tmp_path: Path
) -> None:
    run_file(SCRIPT, str(tmp_path), name, str(ranks), folder=tmp_path)
    found = torch.load(tmp_path / "values.pt", weights_only=True)
    assert found["fit"] == pytest.approx(found["loop"], abs=1e-6)
    # The fit is resumed within its first epoch.
    assert found["resumed"] == pytest.approx(found["fit"], abs=0.0 if ranks == 1 else 1e-6)
    trained = weights(tmp_path / "whole" / "end.ckpt")
    again = weights(tmp_path / "resumed" / "end.ckpt")
    for key, value in found["state"].items():
        torch.testing.assert_close(trained[key], value, atol=1e-6, rtol=0)
        if name == "ddp":  # its buckets are arranged anew after its first step
            torch.testing.assert_close(again[key], trained[key], atol=1e-6, rtol=0)
        else:
            assert torch.equal(again[key], trained[key])


class Net(Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 2)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


def trainer(*callbacks: Any, steps: int = 2, path: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=list(callbacks),
        default_root_dir=path,
        logger=False,
        enable_progress_bar=False,
    )


def test_a_checkpoint_between_steps_has_the_weights_of_evaluation(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}

    class Save(ScheduleFree):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 3:
                saved["before"] = module.net.weight.detach().clone()
                trainer.save_checkpoint(tmp_path / "third.ckpt")
                assert torch.equal(module.net.weight, saved["before"])
                (optimizer,) = trainer.run.require_prepared().optimizers
                optimizer.eval()
                saved["evaluation"] = module.net.weight.detach().clone()
                optimizer.train()

    data: Any = torch.ones(16, 2)
    loader: Any = DataLoader(data, 2)
    trainer(Save(), steps=4, path=tmp_path).fit(Net(schedulefree.SGDScheduleFree), loader)
    found = torch.load(tmp_path / "third.ckpt", weights_only=True)
    assert torch.equal(found["state_dict"]["net.weight"], saved["evaluation"])
    assert torch.equal(found["current_model_state"]["net.weight"], saved["before"])
    assert not torch.equal(saved["before"], saved["evaluation"])


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    data: Any = torch.ones(4, 2)
    loader: Any = DataLoader(data, 2)
    with pytest.raises(ConfigurationError, match=r"expected an optimizer with train\(\) and eval"):
        trainer(ScheduleFree(), path=tmp_path).fit(Net(torch.optim.SGD), loader)


def test_another_average_of_weights_is_refused(tmp_path: Path) -> None:
    data: Any = torch.ones(4, 2)
    loader: Any = DataLoader(data, 2)
    averages = [ScheduleFree(), EMAWeightAveraging(decay=0.9)]
    with pytest.raises(
        ConfigurationError, match="ScheduleFree and EMAWeightAveraging both average"
    ):
        trainer(*averages, path=tmp_path).fit(Net(schedulefree.SGDScheduleFree), loader)


def test_without_the_callback_the_optimizer_raises(tmp_path: Path) -> None:
    data: Any = torch.ones(4, 2)
    loader: Any = DataLoader(data, 2)
    with pytest.raises(Exception, match="not in train mode when step is called"):
        trainer(path=tmp_path).fit(Net(schedulefree.AdamWScheduleFree), loader)
