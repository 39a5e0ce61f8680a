"""Trains a small model and writes, for each rank, where it ran and what it ended with.

python train.py --out=results --devices=2
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.strategies import DDPStrategy


class Net(Module):
    """`width` 0: a few parameters; otherwise two square layers, (width + 1) * width * 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        if width:
            self.net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def bytes_sent() -> int:
    """How many bytes this host has sent to others."""
    rows = [row.split(":") for row in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


class Watch(Callback):
    """Takes its time for each step, tells on rank 0 of each, and keeps what each cost."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.first: int | None = None
        self.began = 0.0
        self.sent_before = 0
        self.took: list[float] = []
        self.sent: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        if self.first is None:
            self.first = trainer.global_step
        time.sleep(self.seconds)
        self.began = time.monotonic()
        self.sent_before = bytes_sent()

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.took.append(time.monotonic() - self.began)
        self.sent.append(bytes_sent() - self.sent_before)
        trainer.print(f"step {trainer.global_step} of {trainer.world_size} ranks", flush=True)


def strategy(options: argparse.Namespace) -> DDPStrategy:
    arguments: dict[str, Any] = {}
    if options.hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        arguments["ddp_comm_hook"] = fp16_compress_hook
    elif options.hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        arguments["ddp_comm_state"] = powersgd.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        arguments["ddp_comm_hook"] = powersgd.powerSGD_hook
    return DDPStrategy(timeout=options.timeout, **arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--hook", choices=["none", "fp16", "powersgd"], default="none")
    options = parser.parse_args()

    watch = Watch(options.seconds)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy(options),
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=options.steps,
        logger=False,
        callbacks=[
            watch,
            *(
                [ModelCheckpoint(options.out, every_n_train_steps=options.save_every)]
                if options.save_every
                else ()
            ),
        ],
        enable_checkpointing=bool(options.save_every),
        enable_progress_bar=False,
        default_root_dir=options.out,
    )
    net = Net(options.width)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, options.width or 4, generator=generator))
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True))

    environment = trainer.strategy.cluster_environment
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank{trainer.global_rank}.json").write_text(
        json.dumps(
            {
                "ranks": [trainer.global_rank, trainer.local_rank, trainer.ranks.node_rank],
                "world_size": trainer.world_size,
                "host": socket.gethostname(),
                "environment": trainer.plan.cluster_environment.name,
                "main": [environment.main_address, environment.main_port],
                "run": environment.run_id(),
                "first_step": watch.first,
                "took": watch.took,
                "sent": watch.sent,
                "weights": next(net.parameters()).flatten()[:8].tolist(),
                "argv": sys.argv[1:],
            }
        )
    )


if __name__ == "__main__":
    main()
