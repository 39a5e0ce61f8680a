"""Classify the nodes of graphs with a graph network, in plain torch.

    python examples/graph_network.py                        # one process
    python examples/graph_network.py --devices 2            # two processes, each its own graphs
    python examples/graph_network.py --devices 2 --strategy fsdp

Each graph has three communities, with more edges inside than between them. A node's own features
say little about its community: a network that ignores the edges (--layers 0) stays far behind.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything

CLASSES = 3


class Graph(NamedTuple):
    """One graph, or several side by side; the Trainer moves the tensors of a NamedTuple."""

    features: Tensor  # (nodes, CLASSES)
    edges: Tensor  # (2, edges): from, to
    labels: Tensor  # (nodes,)


def community_graph(nodes: int = 60) -> Graph:
    labels = torch.randint(CLASSES, (nodes,))
    same = labels[:, None] == labels[None]
    linked = (torch.rand(nodes, nodes) < torch.where(same, 0.25, 0.03)).triu(1)
    features = one_hot(labels, CLASSES) + 1.5 * torch.randn(nodes, CLASSES)
    return Graph(features, (linked | linked.T).nonzero().T, labels)


def side_by_side(graphs: list[Graph]) -> Graph:
    """Make one graph of several, without edges between them: a batch without padding."""
    first = [0, *torch.tensor([len(graph.labels) for graph in graphs]).cumsum(0).tolist()]
    return Graph(
        torch.cat([graph.features for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, first)], 1),  # noqa: B905
        torch.cat([graph.labels for graph in graphs]),
    )


class Convolution(nn.Module):
    """A node's new features: from its own, and from the mean of its neighbors'."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.around = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        total = torch.zeros_like(features).index_add(0, target, features[source])
        count = torch.bincount(target, minlength=len(features)).clamp(min=1)
        mixed: Tensor = self.own(features) + self.around(total / count[:, None])
        return mixed


class GraphNetwork(Module):
    def __init__(self, layers: int = 2, width: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        sizes = [CLASSES] + [width] * layers
        self.convolutions = nn.ModuleList(map(Convolution, sizes[:-1], sizes[1:]))
        self.head = nn.Linear(sizes[-1], CLASSES)

    def forward(self, graph: Graph) -> Tensor:
        features = graph.features
        for convolution in self.convolutions:
            features = convolution(features, graph.edges).relu()
        scores: Tensor = self.head(features)
        return scores

    def training_step(self, graph: Graph, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(graph), graph.labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(graph.labels))
        return loss

    def validation_step(self, graph: Graph, batch_idx: int) -> None:
        right = (self(graph).argmax(1) == graph.labels).float().mean()
        # The mean over batches is one over nodes: the size of a batch is told, not guessed.
        self.log("val_acc", right, prog_bar=True, batch_size=len(graph.labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"devices": 1, "epochs": 10, "layers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    seed_everything(1)
    graphs: Any = [community_graph() for _ in range(160)]
    train = DataLoader(graphs[:128], batch_size=8, shuffle=True, collate_fn=side_by_side)
    val = DataLoader(graphs[128:], batch_size=16, collate_fn=side_by_side)
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    model = GraphNetwork(options.layers)
    before = trainer.validate(model, val, verbose=False)[0]["val_acc"]
    trainer.fit(model, train, val)
    after = trainer.validate(model, val, verbose=False)[0]["val_acc"]
    trainer.print(f"val_acc: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
