"""Callbacks and combined loaders on two ranks: what one process does, each rank its part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.callbacks import EMAWeightAveraging

SCRIPT = Path(__file__).parent / "scripts" / "callbacks_two_ranks.py"

inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks of the script have written what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT.read_text())
    dropped = ("RANK", "WORLD", "MASTER", "NODE", "STRATAGEM", "TORCHELASTIC")
    environment = {k: v for k, v in os.environ.items() if not any(part in k for part in dropped)}
    finished = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


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


def test_an_average_of_sharded_weights_is_that_of_whole_ones(folder: Path) -> None:
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
    sharded = torch.load(folder / "fsdp.ckpt", weights_only=True)["state_dict"]
    assert sharded.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(sharded[name], value)
    # Validation ran on the average, too.
    found = json.loads((folder / "results.json").read_text())
    assert found["validated"] == pytest.approx(net.validated, rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "read"),
    [
        (
            "min_size",
            [
                [[[0, 2], [100, 102]]],
                [[[1, 3], [101, 103]]],
            ],
        ),
        (
            "max_size",
            [
                [[[0, 2], [100, 102]], [[4, 6], None]],
                [[[1, 3], [101, 103]], [[5, 7], None]],
            ],
        ),
        (
            "max_size_cycle",
            [
                [[[0, 2], [100, 102]], [[4, 6], [100, 102]]],
                [[[1, 3], [101, 103]], [[5, 7], [101, 103]]],
            ],
        ),
        (
            "sequential",
            [
                [[0, 2], [4, 6], [100, 102]],
                [[1, 3], [5, 7], [101, 103]],
            ],
        ),
    ],
)
def test_of_combined_loaders_each_rank_reads_its_part(folder: Path, mode: str, read: Any) -> None:
    found = json.loads((folder / "results.json").read_text())
    assert found["read"][mode] == read
