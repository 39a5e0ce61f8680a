"""The average of weights that two ranks share is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.callbacks import EMAWeightAveraging
from stratagem.checkpoint import DirectoryCheckpointIO

SCRIPT = Path(__file__).parent / "scripts" / "average_two_ranks.py"

inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.validated = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += float(self.net(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_ema_of_sharded_weights_equals_ema_of_unsharded_weights(
    run_script: Any, tmp_path: Path
) -> None:
    run_script(SCRIPT.read_text(), timeout=240)
    net, data = Net(), DataLoader(TensorDataset(inputs), 8)
    Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=EMAWeightAveraging(decay=0.8),
        max_epochs=2,
        num_sanity_val_steps=0,
    ).fit(net, data, data)
    sharded = torch.load(tmp_path / "fsdp.ckpt", weights_only=True)["state_dict"]
    assert sharded.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(sharded[name], value)
    # Saved in shards within a run, it is the average as well.
    whole = torch.load(tmp_path / "single_file.ckpt", weights_only=True)
    shards = DirectoryCheckpointIO().load_checkpoint(tmp_path / "directory.ckpt")
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(shards["state_dict"][name], value, rtol=0, atol=0)
        assert not torch.equal(shards["current_model_state"][name], value)
    # Saved in validation or after the fit, where the model has the average, both are there.
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert len(differences) == 4
    for name, found in differences.items():
        assert found == {"state_dict": 0.0, "current_model_state": 0.0}, name
    # Validation ran on the average, too.
    validated = json.loads((tmp_path / "validated.json").read_text())
    assert validated == pytest.approx(net.validated, rel=1e-4)
