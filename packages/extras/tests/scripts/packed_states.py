"""Steps by an optimizer with 8-bit states, a checkpoint and a resume: `... OUT NAME RANKS KIND`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem import Lite
from stratagem.errors import StratagemError

warnings.simplefilter("ignore")  # of torchao and bitsandbytes themselves

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))


def make(kind: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    if kind == "torchao":
        from torchao.optim import AdamW8bit

        of_torchao: Optimizer = AdamW8bit(parameters, lr=1e-2)
        return of_torchao
    import bitsandbytes

    of_bitsandbytes: Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2)
    return of_bitsandbytes


def main(out: str, name: str, ranks: int, kind: str) -> None:
    for form in ("single_file", "directory"):
        lite: Any = Lite(accelerator="cpu", devices=ranks, strategy=name, plugins=form)
        lite.launch()

        def prepared(lite: Any = lite) -> Any:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 128))
            return lite.setup(model, make(kind, model.parameters()))

        def train(model: Any, optimizer: Any, lite: Any = lite) -> list[float]:
            losses = []
            for _ in range(3):
                loss = model(X).square().mean()
                lite.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        try:
            model, optimizer = prepared()
            train(model, optimizer)
            lite.save(f"{out}/{form}", {"model": model, "optimizer": optimizer})
            expected = train(model, optimizer)
            model, optimizer = prepared()
            lite.load(f"{out}/{form}", {"model": model, "optimizer": optimizer})
            again = train(model, optimizer)
        except StratagemError as error:
            print(error)
            return
        if lite.is_global_zero:
            print(f"{form}: {again == expected}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
