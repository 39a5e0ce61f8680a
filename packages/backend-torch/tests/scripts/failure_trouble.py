# Run by test_failure.py.
import os
import sys
import time
from pathlib import Path
import torch
from stratagem import Lite, Module, Trainer
from stratagem.strategies import DDPStrategy

lite = Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=8))
lite.launch()
model = torch.nn.Linear(4, 4)
model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), 0.1))


def step():
    loss = model(torch.ones(2, 4)).sum()
    lite.backward(loss)  # LINE backward
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):
    step()
kind, rank = sys.argv[1], lite.global_rank
Path(f"hangs{rank}").write_text(str(os.getpid()))
if kind == "different collectives":
    if rank == 0:
        lite.all_reduce(torch.ones(4))  # LINE all_reduce
    else:
        lite.broadcast([1, 2, 3])  # LINE broadcast
if kind == "asleep":
    if rank == 1:
        time.sleep(600)  # LINE sleep
    step()
if kind == "one step more on rank 1":
    for _ in range(3 + rank):
        step()
if kind == "one step more on rank 0":
    for _ in range(4 - rank):
        step()
if kind == "exit":
    if rank == 1:
        sys.exit(0)
    step()
if kind == "sizes":
    lite.all_reduce(torch.ones(4 + rank))
if kind == "in a fit":

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            if rank == 0:
                lite.all_gather(torch.ones(4))  # LINE all_gather
            else:
                lite.broadcast([1, 2, 3])
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=8),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 4)))
