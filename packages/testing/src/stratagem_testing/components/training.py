"""A small training under Lite, of which checks compare the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from stratagem.precision import default_dtype

WIDTH = 16
"""Inputs and outputs of a model: what kernels of low precisions want sizes to be multiples of."""


def dense() -> nn.Module:
    """Two layers, and a part that no precision quantises."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )


def build(make: Callable[[], Any] = dense, seed: int = 0) -> nn.Module:
    """Return a model with the same weights, whatever the default dtype and device are."""
    with torch.device("cpu"), default_dtype(torch.float32):
        torch.manual_seed(seed)
        drawn: nn.Module = make()
    model: nn.Module = make()
    model.load_state_dict(drawn.state_dict())  # float64 draws other numbers
    return model


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of 16 samples, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        inputs = torch.randn(16, WIDTH, generator=generator)
        made.append((inputs, inputs.roll(1, 1).sin()))
    return made


def losses_of(lite: Any, make: Callable[[], Any] = dense, steps: int = 6) -> list[float]:
    """Train a model by SGD with momentum; return the loss of each step."""
    lite.launch()
    with lite.init_module():
        net = build(make)
    return train(lite, *set_up(lite, net), steps=steps)


def set_up(lite: Any, net: nn.Module) -> tuple[Any, Any]:
    """Set up a model with an optimizer of the parameters that it has then."""
    model = lite.setup(net)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, lite.setup_optimizers(torch.optim.SGD(trained, lr=0.05, momentum=0.9))


def train(lite: Any, model: Any, optimizer: Any, *, steps: int, begin: int = 0) -> list[float]:
    """Take some steps; return the loss of each."""
    losses = []
    for batch in batches(begin + steps)[begin:]:
        inputs, target = lite.to_device(batch)
        loss = mse_loss(model(inputs), target)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
