# Models for `stratagem mesh check`, run by check/test_check.py; some of them have a mistake.
import torch
import torch.distributed as dist
from expert_models import Written as Mixture
from torch import nn

from stratagem import Module

PLAN = {"up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x + self.dropout(self.down(self.up(x).relu())))


def is_mesh():
    return dist.is_initialized() and dist.get_world_size() > 1


class Doubled(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y + y if is_mesh() else y


class WrongForward(Net):
    def __init__(self):
        super().__init__()
        self.head = Doubled(8, 3)


class WrongGradient(Net):
    """The gradient of the first layer is summed twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.first(x)
        if is_mesh() and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient + gradient)
        return super().forward(hidden)


class WrongBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 2 if is_mesh() else 1
        return super().forward(x)


class NoLoss(Net):
    def forward(self, x):
        return super().forward(x) * float("nan")


class NoModule:
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Chain(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), Block())


class Stack(nn.Module):
    """Six blocks of two kinds, and a head that shares its weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.blocks[3].up, self.blocks[3].down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NeedsValues(Stack):
    def __init__(self):
        super().__init__()
        self.scale = self.head.weight.max().item()


def sequences(index):
    return torch.randn(2, 6, 8)


def batch(index):
    return torch.randn(4, 8)


def loss(model, batch):
    return model(batch).square().sum()


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return "text"


class Logs(Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss


class Manual(Logs):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ThreeHeads(Net):
    def __init__(self):
        super().__init__()
        self.num_heads = 3


def no_batch(index):
    raise ValueError("no data")


def loss_of_first_rank(model, batch):
    if is_mesh() and dist.get_rank() == 1:
        raise ValueError("no loss\nhere")
    return loss(model, batch)


class LostBoundary(Stack):
    """What the second stage receives is lost."""

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x * 0 if index == 3 and is_mesh() else x)
        return self.head(x)
