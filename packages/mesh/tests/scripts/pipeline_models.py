"""Small models of many kinds, with a step and a batch of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stratagem import Module


class Residual(nn.Module):
    """A convolution net with batch norm; the sum of a block stands in the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(4)
        )
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        x = F.relu_(self.norm(x)) * self.scale
        output: Tensor = self.head(x.mean((2, 3)))
        return output


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(F.relu(self.two(F.relu(self.one(x)))))
        return output


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(2, 4), Block(4, 6), Block(6, 8)])
        self.middle = Block(8, 8)
        self.up = nn.ModuleList([Block(16, 6), Block(12, 4), Block(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], 1))
        output: Tensor = self.out(x)
        return output


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = torch.tanh(self.message(torch.cat([nodes[source], nodes[target]], 1)))
        summed = torch.zeros_like(nodes).index_add_(0, target, messages)
        return torch.relu(self.update(torch.cat([nodes, summed], 1)))


class Graphs(nn.Module):
    """Messages over edges; nodes are summed by graph in the model itself, in place."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.layers = nn.ModuleList(MessagePassing() for _ in range(layers))
        self.head = nn.Linear(6, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for layer in self.layers:
            x = x + layer(x, batch["edges"])
        summed = torch.zeros(2, 6, dtype=x.dtype).index_add_(0, batch["graph"], x)
        output: Tensor = self.head(summed)
        return output


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        padded = tokens == 0
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        output: Tensor = self.head(self.encoder(x, src_key_padding_mask=padded))
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first = nn.LSTM(8, 6, batch_first=True)
        self.second = nn.LSTM(6, 6, batch_first=True, num_layers=2)
        self.head = nn.Linear(6, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x, state = self.first(self.embed(tokens))
        state = tuple(each.repeat(2, 1, 1) for each in state)
        x, _ = self.second(x, state)
        output: Tensor = self.head(x)
        return output


class Towers(nn.Module):
    """Two towers that meet in the loss, under a scale of the model's own; one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 6))
        self.image = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, others: Tensor, images: Tensor) -> Tensor:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(tokens).mean(1), dim=-1)
        other = F.normalize(self.text(others).mean(1), dim=-1)
        return self.scale.exp() * (text @ image.T + other @ image.T)


class Parts(Module):
    """Has no forward; training_step calls its layers, in a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"in": nn.Linear(4, 8), "body": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))}
        )
        self.bias = nn.Parameter(torch.rand(8))
        self.out = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        x = self.parts["in"](inputs)
        body: Any = self.parts["body"]
        for layer in body:
            x = torch.relu(layer(x) + self.bias)
        return F.cross_entropy(self.out(x), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _of_logits(model: nn.Module, batch: Any) -> Tensor:
    *inputs, targets = batch
    logits = model(*inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def residual() -> Any:
    return Residual(), _of_logits, (torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,)))


def unet() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.randn_like(batch)
        loss: Tensor = (model(batch + noise) - noise).square().mean()
        return loss

    return UNet(), step, torch.randn(3, 2, 8, 8)


def graphs() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch) - batch["y"]).square().mean()
        return loss

    batch = {
        "x": torch.randn(7, 3),
        "edges": torch.randint(0, 7, (2, 12)),
        "graph": torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        "y": torch.randn(2, 1),
    }
    return Graphs(), step, batch


def encoder() -> Any:
    tokens = torch.randint(1, 20, (3, 6))
    tokens[0, 4:] = 0
    return Encoder(), _of_logits, (tokens, torch.randint(0, 20, (3, 6)))


def recurrent() -> Any:
    tokens = torch.randint(1, 20, (3, 6))
    return Recurrent(), _of_logits, (tokens, torch.randint(0, 20, (3, 6)))


def towers() -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(*batch), torch.arange(4))

    tokens = torch.randint(0, 20, (2, 4, 6))
    return Towers(), step, (tokens[0], tokens[1], torch.randn(4, 5))


def parts() -> Any:
    def step(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model.training_step(batch, 0)
        return loss

    return Parts(), step, (torch.randn(4, 4), torch.randint(0, 2, (4,)))


MODELS: dict[str, Callable[[], Any]] = {
    "residual": residual,
    "unet": unet,
    "graphs": graphs,
    "encoder": encoder,
    "recurrent": recurrent,
    "towers": towers,
    "parts": parts,
}


def made(name: str) -> Any:
    """Return a model, a step and a batch, in float64."""
    torch.manual_seed(0)
    model, step, batch = MODELS[name]()

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    from torch.utils._pytree import tree_map

    return model.double().train(), step, tree_map(double, batch)
