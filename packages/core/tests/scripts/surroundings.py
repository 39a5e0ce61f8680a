"""Trains, saves and resumes: surroundings.py strategy devices default_root_dir.

What has to be told is in files, since stdout may be closed.
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from stratagem import Module, Trainer


class Line(Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = self.weight.sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("value", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    strategy, devices, root = sys.argv[1:]
    batches = DataLoader(torch.arange(8.0), batch_size=2)
    path = None
    for epochs in (1, 2):
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=int(devices),
            max_epochs=epochs,
            default_root_dir=root,
        )
        trainer.fit(Line(), batches, ckpt_path=path)
        path = trainer.checkpoint_callback.best_model_path
    trainer.validate(dataloaders=batches)
    trainer.print(f"saved in {trainer.checkpoint_callback.dirpath!r}")
    print("a message to nobody", file=sys.stderr)
    rank = os.environ.get("RANK", "0")
    Path(f"steps{rank}").write_text(f"{trainer.global_step}")


if __name__ == "__main__":
    main()
