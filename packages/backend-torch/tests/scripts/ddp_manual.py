# Run by test_ddp.py.
import json
import sys
import torch
from torch import nn
from stratagem import Module, Trainer


class Two(Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.second = nn.Linear(3, 1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        one.zero_grad()
        loss = (self.first(batch) - 1).square().mean()
        self.manual_backward(loss)
        one.step()
        two.zero_grad()
        after = (self.second(self.first(batch).detach()) - 2).square().mean()
        self.manual_backward(after)
        two.step()
        both = self.trainer.strategy.ranks.all_reduce(torch.stack([loss, after]).detach())
        self.losses += both.tolist()

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.first.parameters(), lr=0.1),
            torch.optim.Adam(self.second.parameters(), lr=0.1),
        )


if __name__ == "__main__":
    name, devices = sys.argv[1], int(sys.argv[2])
    model = Two()
    trainer = Trainer(
        accelerator="cpu",
        strategy=name,
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.arange(128.0).reshape(32, 4) / 128
    trainer.fit(model, torch.utils.data.DataLoader(data, 8 // devices))
    trainer.print(json.dumps(model.losses))
