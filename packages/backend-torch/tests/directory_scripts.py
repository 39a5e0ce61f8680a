"""Run by test_directory.py: trains under a strategy, saves to a directory or goes on from one.

python directory_scripts.py STRATEGY DEVICES save|load PATH [FORMAT]
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem import Lite
from stratagem.lite.state import collect


def main(strategy: str, devices: str, what: str, path: str, form: str = "directory") -> None:
    """Ten steps and a save, or ten more after a load; write the losses."""
    lite = Lite(accelerator="cpu", devices=int(devices), strategy=strategy, plugins=form)
    lite.launch()
    lite.seed_everything(3)
    # Sizes that two and three ranks do not divide; batch norm has buffers, one of them of integers.
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 5))
    groups: list[dict[str, Any]] = [
        {"params": model[:2].parameters()},
        {"params": model[3].parameters(), "lr": 0.003},
    ]
    model, optimizer = lite.setup(model, torch.optim.AdamW(groups, lr=0.01))
    batches = torch.randn(20, 8, 7, generator=torch.Generator().manual_seed(0))

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for batch in batches[first:last]:
            loss = model(batch).square().mean()
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "step": 10,
        "more": torch.ones(3),
    }
    out: dict[str, Any] = {}
    if what == "save":
        steps(0, 10)
        lite.save(path, state)
        out["written"] = sum(p.stat().st_size for p in Path(path).glob(f"__{lite.global_rank}_*"))
    elif what == "beside training":
        steps(0, 10)
        checkpoint = collect(lite.strategy, state)
        snapshot = copied(checkpoint)
        write = lite.strategy.checkpoint_io.prepare_save(snapshot, path)
        thread = threading.Thread(target=write)
        thread.start()
        out["losses"] = steps(10, 20)
        thread.join()
        # A second one by the same exchange.
        lite.strategy.checkpoint_io.prepare_save(snapshot, f"{path}-again")()
    else:
        state["step"] = 0
        out["rest"] = sorted(lite.load(path, state))
        out["step"] = state["step"]
    if what != "beside training":
        out["losses"] = steps(10, 20)
    Path(f"out-{lite.global_rank}.json").write_text(json.dumps(out))


def copied(data: Any) -> Any:
    """Return weights-only-safe data with copies of its tensors."""
    if isinstance(data, dict):
        return {name: copied(value) for name, value in data.items()}
    if isinstance(data, list):
        return [copied(value) for value in data]
    if isinstance(data, torch.Tensor):
        return data.clone()
    return data.map(torch.clone) if hasattr(data, "map") else data


if __name__ == "__main__":
    main(*sys.argv[1:])
