"""On a GPU: stages 2 and 3 in bfloat16, and offload (`nox -s gpu`). Never run yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Module, Trainer
from stratagem_deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.gpu


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch).float(), batch.float())
        self.losses.append(loss.item())
        return loss

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
