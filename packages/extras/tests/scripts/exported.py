# Run by test_export.py: a sharded model is exported from its checkpoint. `exported.py STRATEGY`
import sys
from pathlib import Path

import torch
from torch import nn

from stratagem import Module, Trainer
from stratagem.errors import ConfigurationError
from stratagem_extras.export import to_exported

name = sys.argv[1]


class Net(Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.down(torch.relu(self.up(inputs)))

    def training_step(self, batch):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = name
if name == "mesh":
    from stratagem.strategies import MeshStrategy

    strategy = MeshStrategy(tensor=2, tensor_plan={"up": "colwise", "down": "rowwise"})
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 4), 2))
trainer.save_checkpoint("net.ckpt")
said = ""
try:
    to_exported(model, f"{trainer.global_rank}.pt2", torch.ones(3, 4))
except ConfigurationError as error:
    said = str(error)
if trainer.is_global_zero:
    Path("said").write_text(said)
    whole = Net.load_from_checkpoint("net.ckpt")
    if said:
        to_exported(whole, "net.pt2", torch.ones(3, 4))
    else:
        Path("0.pt2").rename("net.pt2")
    torch.save(whole.state_dict(), "weights.pt")
