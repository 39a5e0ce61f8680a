# Run by test_strangers_launcher.py.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, StrategyRegistry, Trainer
from stratagem.discovery import LauncherSpec
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
    StrategyRegistry.register("mine", DDPStrategy, gradient_as_bucket_view=True)
