# Run by test_failure.py.
import os
import sys
import time
import torch
from stratagem import Lite
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
