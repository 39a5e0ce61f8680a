"""An accelerator of your own: CPU cores as devices, each rank on a core that no other rank uses.

    python examples/custom_accelerator.py                   # one process, on one core
    python examples/custom_accelerator.py --devices 2       # two processes, on two cores
    python examples/custom_accelerator.py --devices 2 --strategy ddp_sharded

Without it, the system moves ranks between cores, and each time their caches are cold (Linux only).
An accelerator for real devices has the same methods: where torch knows them, derive from
`DeviceAccelerator`; `stratagem new-backend NAME --kind accelerator` writes a package with tests.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer, seed_everything
from stratagem.accelerators import Accelerator
from stratagem.discovery import Availability


class PinnedCores(Accelerator):
    """The cores of this process, one for each rank.

    Two methods have to be there: which devices exist, and which torch.device one of them is.
    """

    name = "pinned_cores"
    process_group_backend = "gloo"  # of torch.distributed, for tensors of these devices

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))

    def availability(self) -> Availability:
        """Called in the first process, before any other is started."""
        # Not indexed: to torch, all cores are one device.
        return Availability(len(self.cores), f"{len(self.cores)} cores", indexed=False)

    def device(self, index: int) -> torch.device:
        """The device of torch for each core."""
        return torch.device("cpu")

    def setup(self) -> None:
        """Called on each rank before its first tensor. Launchers set LOCAL_RANK."""
        core = self.cores[int(os.environ.get("LOCAL_RANK", "0")) % len(self.cores)]
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)  # more threads would only wait for each other there

    def teardown(self) -> None:
        """Called on each rank at the end of a stage: give back what `setup` took."""
        os.sched_setaffinity(0, self.cores)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Torch has no class of its own for the error of a CPU."""
        return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """What a DeviceStatsMonitor logs between steps."""
        return {"load_average": os.getloadavg()[0]}


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.core = -1

    def on_train_start(self) -> None:
        (self.core,) = os.sched_getaffinity(0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = mse_loss(self.layer(x), x.sum(1, keepdim=True))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_end(self) -> None:
        cores = self.all_gather(torch.tensor(self.core)).flatten().tolist()
        self.print(f"cores of the ranks: {cores}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    seed_everything(1)
    loader = DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=16, shuffle=True)
    trainer = Trainer(
        accelerator=PinnedCores(),
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
    )
    trainer.print(trainer.plan.explain())
    trainer.fit(Line(), loader)
    trainer.print(f"train_loss: {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
