# Run by test_network.py, and over two hosts by tests/clusters: trains on two ranks and prints, from
# inside a step, what the whole tree of processes listens on.
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer

MARK = f"LISTENING_MARK={os.environ['LISTENING_MARK']}".encode()
LISTENS = "0A"
NUM_NODES = int(os.environ.get("NUM_NODES", 1))


def inodes_of_tree():
    """Of the sockets of all processes that have inherited the mark, the launcher's too."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that has ended
            if MARK in (process / "environ").read_bytes().split(b"\0"):
                for descriptor in (process / "fd").iterdir():
                    with suppress(OSError):  # one that was closed
                        found.add(str(descriptor.readlink()))
    return {link[8:-1] for link in found if link.startswith("socket:[")}


def listening():
    inodes, found = inodes_of_tree(), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.trainer.local_rank == 0 and batch_idx == 1:
            addresses = " ".join(sorted(listening()))
            store = torch.distributed.distributed_c10d._get_default_store()
            while hasattr(store, "underlying_store"):  # of a PrefixStore
                store = store.underlying_store
            print(f"STORE {type(store).__name__}", flush=True)
            print(f"LISTENING {addresses} of {self.trainer.world_size}", flush=True)
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=2 // NUM_NODES,
        num_nodes=NUM_NODES,
        strategy=sys.argv[1],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2))
