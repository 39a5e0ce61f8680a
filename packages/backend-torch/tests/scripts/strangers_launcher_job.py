# Run by test_strangers_launcher.py.
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, StrategyRegistry, Trainer
from stratagem.discovery import ClusterEnvironmentSpec, LauncherSpec
from stratagem.discovery.registry import get_registry
from stratagem.strategies import DDPStrategy
from strangers_launcher import SubprocessLauncher


class Net(Module):
    def __init__(self, fails_on=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.fails_on = fails_on

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.fails_on:
            raise ValueError(f"no good on rank {self.fails_on}")
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=4)


def trained(fails_on=None, **options):
    net = Net(fails_on)
    options = {"logger": False, "enable_progress_bar": False, "max_epochs": 1, **options}
    trainer = Trainer(accelerator="cpu", devices=2, enable_checkpointing=False, **options)
    trainer.fit(net, loader())
    return net.net.weight.detach()


def job(lite, word):
    total = lite.all_reduce(torch.tensor(float(lite.global_rank)), reduce_op="sum")
    return [word, lite.world_size, lite.strategy.components.num_nodes, float(total)]


def where(lite):
    environment = lite.strategy.cluster_environment
    return [environment.run_id(), environment.restart_count(), sys.argv[1:]]


def seeds():
    return [os.environ.get("STRATAGEM_SEED"), os.environ.get("STRATAGEM_SEED_WORKERS")]


def join_and_leave():
    Lite(accelerator="cpu", strategy="ddp", devices=1).launch()
    assert torch.distributed.is_initialized()
    sys.exit(7)


def register():
    get_registry().add(
        LauncherSpec(
            name="subprocesses",
            target="strangers_launcher:SubprocessLauncher",
            api_version=1,
            new_processes=True,
            spans_nodes=True,
        )
    )
    get_registry().add(
        ClusterEnvironmentSpec(
            name="second_start", target="strangers_launcher:SecondStart", api_version=1
        )
    )
    StrategyRegistry.register("mine", DDPStrategy, gradient_as_bucket_view=True)
