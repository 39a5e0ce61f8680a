"""Writes core's tests/files/lightning_attributes.txt, from Lightning as it is installed here.

    pip install lightning==2.6.6
    python packages/lightning/scripts/attributes.py

A line has a class and its public attributes, as `Class: name name`. They include the attributes
that objects have after `__init__`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

FILE = Path(__file__).parents[3] / "packages/core/tests/files/lightning_attributes.txt"
STRATEGIES = ("Strategy", "SingleDeviceStrategy", "ParallelStrategy", "DDPStrategy")


def public_names(kind: type, *made: object) -> set[str]:
    """Return the public names of a class, without those of torch, and of its objects."""
    names = {name for one in made for name in vars(one)}
    for base in kind.__mro__:
        if base.__module__.startswith("lightning"):
            names |= vars(base).keys() | vars(base).get("__annotations__", {}).keys()
    return {name for name in names if not name.startswith("_")}


def main() -> None:
    """Write the file."""
    pytorch = importlib.import_module("lightning.pytorch")
    fabric = importlib.import_module("lightning.fabric")
    module = importlib.import_module("torch.nn").Module()
    trainer = pytorch.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    kinds = [getattr(pytorch.strategies, name) for name in STRATEGIES]
    model = pytorch.LightningModule()
    data = pytorch.LightningDataModule()
    found = {
        "Trainer": public_names(pytorch.Trainer, trainer),
        "Fabric": public_names(fabric.Fabric, fabric.Fabric(accelerator="cpu")),
        "Strategy": set().union(*map(public_names, kinds), vars(trainer.strategy)),
        "LightningModule": public_names(pytorch.LightningModule, model) - {*dir(module)},
        "LightningDataModule": public_names(pytorch.LightningDataModule, data),
        "Callback": public_names(pytorch.Callback),
    }
    lines = [
        f"{kind}: {' '.join(sorted(name for name in names if not name.startswith('_')))}\n"
        for kind, names in found.items()
    ]
    FILE.write_text("".join(lines))


if __name__ == "__main__":
    main()
