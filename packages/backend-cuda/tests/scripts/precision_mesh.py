# Run by test_precision_ranks.py: float8 and MXFP8 on a mesh; `precision_mesh.py RANKS`.
import json
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.strategies import MeshStrategy
from stratagem_cuda.precision import Float8Precision, MXFP8Precision

ranks = int(sys.argv[1])
found = {}


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, inputs):
        return inputs + self.down(torch.relu(self.up(inputs)))


for name, precision, hidden in (
    ("bf16-mixed", "bf16-mixed", 64),
    ("bf16-mixed, 16", "bf16-mixed", 16),
    ("bf16-mixed, 32", "bf16-mixed", 32),
    ("float8, tensorwise", Float8Precision(emulate=True), 64),
    ("float8, rowwise", Float8Precision(recipe="rowwise", emulate=True), 64),
    ("float8, small parts", Float8Precision(emulate=True), 16),
    ("mxfp8", MXFP8Precision(emulate=True), 64),
    ("mxfp8, small parts", MXFP8Precision(emulate=True), 32),
):
    plan = {"up": "colwise", "down": "rowwise"}
    strategy = MeshStrategy(tensor=2, tensor_plan=plan) if ranks == 2 else "auto"
    options = {"precision" if isinstance(precision, str) else "plugins": precision}
    lite = Lite(accelerator="cpu", devices=ranks, strategy=strategy, **options)
    lite.launch()
    net = Block(hidden)
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(2, 64, 32, generator=draw)
    losses = []
    for _ in range(6):
        loss = mse_loss(model(inputs).float(), targets)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kinds = [type(layer).__name__ for layer in (net.up, net.down)]
    found[name] = {"losses": losses, "kinds": kinds}
if lite.is_global_zero:
    with open(f"found{ranks}.json", "w") as file:
        json.dump(found, file)
