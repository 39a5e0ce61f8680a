"""State of a model in stages, by each way to save and to load it: `... FOLDER RANKS [CASE ...]`.

Each case writes FOLDER/CASE.pt: tensors to compare with one process, or an error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer, seed_everything
from stratagem.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TrainedWeightsOnly,
)
from stratagem.checkpoint import PretrainedWeights, save_pretrained
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
WORDS, WIDTH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Net(Module):
    """Its head shares the weight of the embedding, which lies in the other stage."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        if frozen:
            self.blocks[:3].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor) -> Tensor:
        return cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.05)


def loader() -> DataLoader[Any]:
    tokens = torch.randint(0, WORDS, (24, 6), generator=torch.Generator().manual_seed(3))
    data: Any = tokens
    return DataLoader(data, batch_size=4)


def strategy() -> Any:
    return "single_device" if RANKS == 1 else MeshStrategy(pipeline=RANKS)


def trainer(**options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        **{"max_epochs": 2, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0},
        **options,
    }
    return Trainer(accelerator="cpu", devices=RANKS, strategy=strategy(), **chosen)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def fitted(path: Path, callback: Any, **options: Any) -> dict[str, Any]:
    """Train with a callback, save, and return the saved weights."""
    seed_everything(1)
    own = trainer(callbacks=callback)
    own.fit(Net(**options), loader(), loader())
    own.save_checkpoint(path)
    own.ranks.barrier("saved")
    return {**read(path)["state_dict"], "loss": own.callback_metrics["loss"]}


def averaged(path: Path) -> dict[str, Any]:
    return fitted(path, StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1))


def trained_only(path: Path) -> dict[str, Any]:
    """Leave frozen weights out of a checkpoint, and resume from it."""
    found = fitted(path, TrainedWeightsOnly(), frozen=True)
    seed_everything(1)
    own = trainer(callbacks=TrainedWeightsOnly(), max_epochs=3)
    own.fit(Net(frozen=True), loader(), ckpt_path=path)
    own.save_checkpoint(path.with_suffix(".last"))
    own.ranks.barrier("saved")
    last = read(path.with_suffix(".last"))["state_dict"]
    return {**found, **{f"resumed {name}": value for name, value in last.items()}}


def resumed_average(path: Path) -> dict[str, Any]:
    """Resume a run with a moving average, of which the checkpoint has two copies of weights."""
    seed_everything(1)
    own = trainer(callbacks=EMAWeightAveraging(decay=0.5), max_epochs=1)
    own.fit(Net(), loader())
    own.save_checkpoint(path)
    seed_everything(2)
    second = trainer(callbacks=EMAWeightAveraging(decay=0.5), max_epochs=2)
    second.fit(Net(), loader(), ckpt_path=path)
    second.save_checkpoint(path.with_suffix(".last"))
    second.ranks.barrier("saved")
    saved = read(path.with_suffix(".last"))
    trained = {f"trained {name}": value for name, value in saved["current_model_state"].items()}
    return {**saved["state_dict"], **trained}


def validated(path: Path) -> dict[str, Any]:
    """Validate a checkpoint, of one process if it is there."""
    seed_everything(1)
    own = trainer(max_epochs=1)
    own.fit(Net(), loader())
    own.save_checkpoint(path)
    other = path.parent.parent / "alone" / path.name
    seed_everything(2)
    (found,) = trainer().validate(Net(), loader(), ckpt_path=other if other.exists() else path)
    return {"loss": torch.tensor(found["loss"])}


def best(path: Path) -> dict[str, Any]:
    """Load the best checkpoint of a run into a new model."""
    seed_everything(1)
    keep = ModelCheckpoint(path, monitor="loss")
    own = trainer(callbacks=keep, enable_checkpointing=True)
    own.fit(Net(), loader(), loader())
    own.validate(dataloaders=loader(), ckpt_path="best")
    model = Net.load_from_checkpoint(keep.best_model_path)
    return {**model.state_dict(), "loss": own.callback_metrics["loss"]}


def lite() -> Lite:
    made = Lite(accelerator="cpu", devices=RANKS, strategy=strategy())
    made.launch()
    return made


def steps(own: Lite, model: Any) -> None:
    for batch in list(loader())[:2]:
        own.step(model, [batch], lambda one: model.training_step(one))


def folder(path: Path) -> dict[str, Any]:
    """Write the weights in Hugging Face's layout, and read them."""
    own = lite()
    seed_everything(1)
    made = Net()
    model, _ = own.setup(made, made.configure_optimizers())
    steps(own, model)
    save_pretrained(model, path)
    seed_everything(2)
    other = own.setup(Net())
    own.load_weights(other, PretrainedWeights(path))
    own.save(path.with_suffix(".ckpt"), {"model": other})
    own.barrier()
    found: dict[str, Any] = read(path.with_suffix(".ckpt"))["model"]
    return found


def trained_from(path: Path) -> dict[str, Any]:
    """Train a model without values from a folder that lacks the second name of a tied weight."""
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    if not (path / "model.safetensors").exists():
        seed_everything(1)
        weights = Net().state_dict()
        del weights["head.weight"]
        save_file(weights, path / f"model.{os.getpid()}")
        (path / f"model.{os.getpid()}").replace(path / "model.safetensors")

    class Late(Net):
        def __init__(self) -> None:
            Module.__init__(self)

        def configure_model(self) -> None:
            if not hasattr(self, "words"):
                with torch.device("meta" if RANKS > 1 else "cpu"):
                    Net.__init__(self)

    own = trainer(weights=path)
    own.fit(Late(), loader(), loader())
    own.save_checkpoint(path / "last")
    own.ranks.barrier("saved")
    return {**read(path / "last")["state_dict"], "loss": own.callback_metrics["loss"]}


def adapter(path: Path) -> dict[str, Any]:
    return _adapted(path, merges=False)


def merged(path: Path) -> dict[str, Any]:
    return _adapted(path, merges=True)


def _adapted(path: Path, *, merges: bool) -> dict[str, Any]:
    import peft
    from safetensors.torch import load_file

    own = lite()
    seed_everything(1)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"])
    made: Any = peft.inject_adapter_in_model(config, Net())
    trained = [p for p in made.parameters() if p.requires_grad]
    model, _ = own.setup(made, torch.optim.AdamW(trained, lr=0.05))
    steps(own, model)
    save_pretrained(model, path, merged=merges)
    own.barrier()
    (file,) = path.glob("*.safetensors")
    found = dict(load_file(file))
    if merges:
        return found
    seed_everything(1)
    again: Any = own.setup(peft.inject_adapter_in_model(config, Net()))
    own.load_weights(again, path)
    save_pretrained(again, path.with_suffix(".again"))
    own.barrier()
    (file,) = path.with_suffix(".again").glob("*.safetensors")
    return {**found, **{f"read {name}": value for name, value in load_file(file).items()}}


def groups(path: Path) -> dict[str, Any]:
    """Train with groups of parameters that one stage has alone, and load the optimizer's state."""
    own = lite()

    def objects() -> Any:
        made = Net()
        of_blocks: list[Any] = [
            {"params": list(block.parameters()), "lr": 0.01 * (1 + index)}
            for index, block in enumerate(made.blocks)
        ]
        return own.setup(made, torch.optim.AdamW([*of_blocks, {"params": made.words.weight}]))

    seed_everything(1)
    model, optimizer = objects()
    steps(own, model)
    own.save(path, {"model": model, "optimizer": optimizer})
    model, optimizer = objects()
    own.load(path, {"model": model, "optimizer": optimizer})
    steps(own, model)
    own.save(path.with_suffix(".last"), {"model": model, "optimizer": optimizer})
    own.barrier()
    saved = read(path.with_suffix(".last"))
    state = saved["optimizer"]["state"]
    found = {f"{n}, {key}": value for n, own in state.items() for key, value in own.items()}
    return {**saved["model"], **found}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        *(averaged, trained_only, resumed_average, validated, best),
        *(folder, trained_from, adapter, merged, groups),
    )
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[3:] or CASES:
        try:
            found = CASES[name](FOLDER / name)
        except StratagemError as error:
            found = {"error": str(error)}
        torch.save(found, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
