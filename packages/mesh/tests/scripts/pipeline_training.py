"""Trains as users do, on one process or two stages: `python pipeline_training.py FOLDER RANKS`.

Each rank writes the values of each case into FOLDER/RANK.json.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from stratagem import Lite, Module, Trainer, seed_everything
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem_mesh import MeshStrategy

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)
        self.correct = Accuracy(task="multiclass", num_classes=3)
        self.correct_later = Accuracy(task="multiclass", num_classes=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.correct(logits, batch[1])
        self.log("correct", self.correct, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.log("val", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.correct_later(logits, batch[1])
        self.log("val_correct", self.correct_later)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Normed(Net):
    """Has statistics on one stage; fails in a later validation, on each rank."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.fails = fails

    def validation_step(self, batch: list[Tensor]) -> None:
        if self.fails:
            raise RuntimeError("planted")
        super().validation_step(batch)


class HeadAlone(Net):
    """Trains the last layer; the optimizer keeps a state from the beginning."""

    def configure_optimizers(self) -> Any:
        self.first.requires_grad_(False)
        self.blocks.requires_grad_(False)
        groups = [{"params": [self.head.weight]}, {"params": [self.head.bias], "lr": 0.05}]
        return torch.optim.Adagrad(groups, lr=0.1)


class Tied(Module):
    """Trains its tied weight without decay, by the name of the weight in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.words(batch)
        for block in self.blocks:
            x = x + block(x).tanh()
        loss = cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        decayed = [p for name, p in named.items() if not name.startswith("words")]
        groups = [{"params": decayed}, {"params": [named["words.weight"]], "weight_decay": 0.0}]
        self.groups = [len(group["params"]) for group in groups]
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)


class Manual(Net):
    automatic_optimization = False


def loader(samples: int, batch: int = 4) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(3)
    data = (
        torch.randn(samples, 6, generator=chance),
        torch.randint(0, 3, (samples,), generator=chance),
    )
    return DataLoader(TensorDataset(*data), batch_size=batch)


def strategy() -> Any:
    return MeshStrategy(pipeline=2) if RANKS > 1 else "single_device"


def trainer(**options: Any) -> Trainer:
    given = {"max_epochs": 4, "accumulate_grad_batches": 2, "strategy": strategy(), **options}
    return Trainer(
        **given,
        accelerator="cpu",
        devices=RANKS,
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )


def values(own: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in own.callback_metrics.items()}


def logged() -> Any:
    """The last batches of training and of evaluations are smaller."""
    stop = EarlyStopping("loss_epoch", min_delta=0.03, patience=0)
    best = ModelCheckpoint(FOLDER, monitor="correct", mode="max", filename="{epoch}-{correct:.3f}")
    own = trainer(max_epochs=30, callbacks=[stop, best])
    own.fit(model := Net(), loader(18), loader(10))
    predicted: Any = own.predict(model, loader(10))
    return values(own), own.current_epoch, best.best_model_path, [p.tolist() for p in predicted]


def head_alone() -> Any:
    own = trainer()
    own.fit(HeadAlone(), loader(18), loader(10))
    return values(own)


def tied() -> Any:
    seed_everything(1)
    own = trainer(max_epochs=3)
    own.fit(model := Tied(), DataLoader(torch.arange(48).view(8, 6) % 12, batch_size=2))
    return values(own), model.groups


def twice() -> Any:
    """Two models, one after the other, by one strategy; both are released."""
    found, alive = [], []
    given = strategy()
    for _ in range(2):
        seed_everything(1)
        own = trainer(strategy=given)
        own.fit(model := Net(), loader(18))
        found.append(values(own))
        alive.append(ref(model))
        del model, own
    gc.collect()
    return found, [one() is None for one in alive]


def again() -> Any:
    """One model by two strategies, one after the other."""
    model = Net()
    for _ in range(2):
        own = trainer()
        own.fit(model, loader(18))
    given = MeshStrategy(pipeline=2, virtual_stages=2)
    said = error_of(lambda: trainer(strategy=given).fit(model, loader(18))) if RANKS > 1 else ""
    return values(own), said


def resumed() -> Any:
    """Statistics of a batch norm, which resume; and an error of user code after a step."""
    path = FOLDER / "normed.ckpt"
    begun = trainer(max_epochs=2)
    begun.fit(Normed(), loader(16))
    begun.save_checkpoint(path)
    own = trainer()
    own.fit(Normed(), loader(16), ckpt_path=path)
    said = error_of(lambda: trainer().fit(Normed(fails=True), loader(16), loader(8)))
    return values(own), said


def own_loop() -> Any:
    lite = Lite(accelerator="cpu", devices=RANKS, strategy=strategy())
    lite.launch()
    seed_everything(1)
    net = Net()
    model, _ = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.2))

    def loss(batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    batches = list(lite.setup_dataloaders(loader(18)))
    steps = [lite.step(model, batches, loss, max_norm=0.5) for _ in range(3)]
    model.eval()
    with torch.no_grad():
        outputs = lite.gather_for_metrics(model(batches[-1][0]))
    said = {
        "backward": error_of(lambda: lite.backward(torch.ones((), requires_grad=True))),
        "forward": error_of(lambda: model.train()(batches[0][0])),
        "nothing": error_of(lambda: lite.step(model, batches[:2], lambda batch: None)),
    }
    return [float(step) for step in steps if step is not None], outputs.tolist(), said


def refused() -> Any:
    return error_of(lambda: trainer(accumulate_grad_batches=1).fit(Manual(), loader(8)))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    found = {}
    cases = (logged, head_alone, tied, twice, again, resumed, own_loop)
    for case in (*cases, *([refused] if RANKS > 1 else [])):
        seed_everything(1)
        found[case.__name__] = case()
    rank = torch.distributed.get_rank() if RANKS > 1 else 0
    (FOLDER / f"{rank}.json").write_text(json.dumps(found))
