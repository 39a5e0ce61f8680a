"""On a GPU: training, mixed precision and RNG states (`nox -s gpu`). Never run yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from stratagem import Lite
from stratagem_cuda.accelerator import CUDAAccelerator

pytestmark = pytest.mark.gpu


def train(precision: str, path: Path | None = None, *, load: bool = False) -> dict[str, Any]:
    """Take six steps with dropout, saved after the third, or the last three."""
    lite = Lite(accelerator=CUDAAccelerator(), devices=1, precision=precision)
    lite.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 16))
    model, optimizer = lite.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    batches: Any = torch.split(inputs, 4)
    loader = lite.setup_dataloaders(DataLoader(batches, batch_size=None))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if load and path is not None:
        torch.rand(5, device="cuda")
        lite.load(path, dict(state))
    for number, batch in enumerate(loader, 1):
        lite.backward(mse_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
        if path is not None and not load and number == 3:
            lite.save(path, state)
    return {name: value.cpu() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_dropout_on_the_gpu_resumes_bit_for_bit(precision: str, tmp_path: Path) -> None:
    whole = train(precision, tmp_path / "half.ckpt")
    rest = train(precision, tmp_path / "half.ckpt", load=True)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


def test_an_accelerator_in_use_must_not_be_forked() -> None:
    torch.ones(1, device="cuda")
    assert "has used cuda devices already" in str(CUDAAccelerator().fork_problem())
