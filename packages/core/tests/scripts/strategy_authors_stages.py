# Run by test_strategy_authors.py.
import json
import sys
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader
from stratagem import Module, Trainer
from stratagem.discovery import Capabilities
from stratagem.errors import DivergenceError, PluginError
from stratagem.strategies import ParallelStrategy


class Stages(ParallelStrategy):
    # Two pipelines of two stages, side by side: rank 0 with 2, rank 1 with 3.
    capabilities = Capabilities(
        launchers=("script",), one_process=False, many_devices=True, parameters="divided"
    )

    def data_split_of(self, rank, world_size):
        return rank % 2, 2

    def model_state(self, prepared):
        state = super().model_state(prepared)
        if self.ranks.global_rank == 2:
            state["of the second stage"] = torch.ones(1)
        return state


class Alike(Stages):
    capabilities = Capabilities(launchers=("script",), one_process=False, many_devices=True)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("part", float(rank % 2), on_step=False, on_epoch=True)
        self.log("sum", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("now", float(rank % 2), on_step=True, sync_dist=True)
        if rank >= 2:
            self.log("last", float(rank), on_step=False, on_epoch=True)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy, model, **arguments):
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(model, DataLoader(torch.ones(4, 1), batch_size=1))
    return trainer


trainer = fit(Stages(), Net())
out = {name: value.item() for name, value in trainer.callback_metrics.items()}
out["batches"] = trainer.global_step
try:
    trainer.save_checkpoint("all.ckpt")
except PluginError as error:
    out["state"] = str(error)
out["saved"] = Path("all.ckpt").exists()
model = Net()
if trainer.global_rank >= 2:
    model.more = nn.Linear(2, 2)
try:
    fit(Alike(), model, detect_divergence=1)
except DivergenceError as error:
    out["divergence"] = str(error)
Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(out))
