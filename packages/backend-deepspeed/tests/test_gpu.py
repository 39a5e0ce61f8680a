"""On a GPU: bfloat16, float16, offload and FusedAdam (`nox -s gpu`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Module, Trainer
from stratagem_deepspeed.preparation import can_fuse_adam
from stratagem_deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.gpu


class Net(Module):
    def __init__(self, overflows: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.overflows = overflows
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch).float(), batch.float())
        self.losses.append(loss.item())
        return loss * (1e30 if batch_idx in self.overflows else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_training_in_bfloat16_on_one_gpu_lowers_the_loss(
    stage: int, offload: bool, tmp_path: Path
) -> None:
    module = Net()
    strategy = DeepSpeedStrategy(
        stage=stage, offload_optimizer=offload, offload_parameters=offload and stage == 3
    )
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=50,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, [torch.randn(32, 16) for _ in range(50)])
    assert module.losses[-1] < 0.7 * module.losses[0]
    assert {p.device.type for p in module.parameters()} == {"cuda"} or offload


def fit(module: Module, strategy: DeepSpeedStrategy, precision: str, folder: Path) -> Trainer:
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, [torch.randn(32, 16) for _ in range(50)])
    return trainer


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_leaves_out_steps_that_overflow(precision: str, stage: int, tmp_path: Path) -> None:
    module = Net(overflows=(10, 20))
    strategy = DeepSpeedStrategy(stage=stage, initial_scale_power=8, hysteresis=1)
    trainer = fit(module, strategy, precision, tmp_path)
    assert trainer.global_step == 48
    assert module.losses[-1] < 0.7 * module.losses[0]


def test_adam_of_the_config_is_fused_if_buildable(tmp_path: Path) -> None:
    class ByConfig(Net):
        configure_optimizers = Module.configure_optimizers

    section = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    module = ByConfig()
    trainer = fit(module, DeepSpeedStrategy(stage=2, config=section), "bf16-mixed", tmp_path)
    engine: Any = trainer.run.require_prepared().module.engine
    expected = "FusedAdam" if can_fuse_adam("cuda") else "AdamW"
    assert type(engine.basic_optimizer).__name__ == expected
    assert module.losses[-1] < 0.7 * module.losses[0]
