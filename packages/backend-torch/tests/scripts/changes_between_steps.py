"""Hooks change or freeze weights between steps, with validation: losses, by strategy.

python changes_between_steps.py STRATEGY RANKS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import BackboneFinetuning, EMAWeightAveraging
from stratagem.strategies import DDPStrategy, FSDPStrategy

EPOCHS, SAMPLES, BATCH = 4, 16, 8


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.backbone(x))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class HeadFirst(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


def at(hook: str, epochs: tuple[int, ...], change: Callable[[Net], None]) -> Callback:
    """A callback whose hook of that name changes the model in some epochs."""

    def call(self: Callback, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.current_epoch in epochs and not trainer.sanity_checking:
            change(module)

    made: Callback = type("Change", (Callback,), {hook: call})()
    return made


def halve(net: Net) -> None:
    with torch.no_grad():
        net.head.weight.mul_(0.5)


def freeze(net: Net) -> None:
    net.backbone.requires_grad_(False)


def unfreeze(net: Net) -> None:
    net.backbone.requires_grad_(True)


def freeze_head(net: Net) -> None:
    net.head.requires_grad_(False)


def unfreeze_all(net: Net) -> None:
    net.requires_grad_(True)


def freeze_biases(net: Net) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("bias" not in name)


def begin_again(net: Net) -> None:
    """Give a layer other weights."""
    with torch.no_grad():
        nn.init.constant_(net.head.weight, 0.25)
        nn.init.zeros_(net.head.bias)


def shift_data(net: Net) -> None:
    """Change what `.data` holds."""
    net.head.weight.data.add_(0.125)


def clamp(net: Net) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.25, 0.25)


def shrink_by_list(net: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 0.5)


def slower(net: Net) -> None:
    for group in net.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.5


def forget_momentum(net: Net) -> None:
    for state in net.trainer.optimizers[0].state.values():
        state["momentum_buffer"].zero_()


def shrink_by_output(net: Net) -> None:
    """Call the model without gradients, and shrink a layer by what it returns."""
    net.eval()
    with torch.no_grad():
        size = float(net(torch.ones(2, 4)).abs().mean())
        net.head.weight.mul_(1 / (1 + size))
    net.train()


def log_norm(net: Net) -> None:
    net.log("norm", net.head.weight.norm())


def divide_by_norm(net: Net) -> None:
    """Read numbers of a whole parameter and of its gradient."""
    with torch.no_grad():
        size = float(net.backbone[0].weight.norm()) + net.backbone[0].weight.grad.abs().max().item()
        net.backbone[0].weight.mul_(1 / (1 + size))


def set_item(net: Net) -> None:
    with torch.no_grad():
        net.head.weight[0] = torch.ones(6)


def read_as_numpy(net: Net) -> None:
    net.head.weight.detach().numpy()


def replace_data(net: Net) -> None:
    net.head.weight.data = torch.zeros(1, 6)


def replace_parameter(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.zeros(1, 6))


def add_plain_tensor(net: Net) -> None:
    with torch.no_grad():
        net.head.weight.add_(torch.ones(1, 6))


def call_layer(net: Net) -> None:
    net.head(torch.ones(2, 6))


def read_storage(net: Net) -> None:
    """Read memory as a format for weights does when it saves them."""
    net.head.weight.untyped_storage().data_ptr()


class Decaying(Net):
    """Changes its weights between the forward and the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.weight.mul_(0.99)
        return loss


START, END = "on_train_epoch_start", "on_train_epoch_end"
HALVED_IN = (
    *(START, END, "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
CASES: dict[str, Callable[[], list[Callback]]] = {
    "unchanged": list,
    "finetuning": lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)],
    "frozen for an epoch": lambda: [at(START, (1,), freeze), at(START, (2,), unfreeze)],
    "frozen by validation": lambda: [
        at("on_validation_end", (0,), freeze),
        at("on_validation_start", (2,), unfreeze),
    ],
    "frozen from the start": lambda: [at("on_fit_start", (0,), freeze), at(START, (2,), unfreeze)],
    "frozen twice": lambda: [
        at(START, (0, 2), freeze),
        at(START, (1, 3), unfreeze),
    ],
    "one part after the other": lambda: [
        at(START, (0,), freeze_head),
        at(START, (1,), unfreeze_all),
        at(START, (2,), freeze),
    ],
    "biases frozen": lambda: [at(START, (1,), freeze_biases), at(END, (2,), unfreeze_all)],
    "frozen, then halved": lambda: [at(START, (1,), freeze), at(END, (1, 2), halve)],
    "halved, then frozen": lambda: [
        at("on_validation_end", (0,), halve),
        at(START, (1,), freeze_head),
        at(END, (2,), unfreeze_all),
    ],
    "begun again": lambda: [at(START, (2,), begin_again)],
    "begun again after validation": lambda: [at("on_validation_end", (1,), begin_again)],
    "data shifted": lambda: [at(END, (0, 1), shift_data)],
    "data shifted in a step": lambda: [at("on_train_batch_start", (1,), shift_data)],
    "clamped after each step": lambda: [at("on_train_batch_end", (0, 1, 2, 3), clamp)],
    "clamped after validation": lambda: [at("on_validation_end", (0, 1, 2), clamp)],
    "shrunk as a list": lambda: [at("on_validation_epoch_end", (1,), shrink_by_list)],
    "slower": lambda: [at(START, (1, 2), slower)],
    "momentum forgotten": lambda: [at(END, (1,), forget_momentum)],
    "shrunk by what the model returns": lambda: [at(END, (0, 1), shrink_by_output)],
    "norm logged": lambda: [at(END, tuple(range(EPOCHS)), log_norm)],
    "divided by a norm": lambda: [at("on_before_optimizer_step", (0, 2), divide_by_norm)],
    "average": lambda: [EMAWeightAveraging(decay=0.5)],
    **{f"halved in {hook}": (lambda hook=hook: [at(hook, (1, 2), halve)]) for hook in HALVED_IN},
}


# What FSDP2 would ignore, or ends with an error of its own.
REFUSED: dict[str, Callable[[], list[Callback]]] = {
    "decaying": list,
    **{
        change.__name__: (lambda change=change: [at(END, (0,), change)])
        for change in (
            *(replace_data, replace_parameter, add_plain_tensor, call_layer),
            *(set_item, read_as_numpy),
        )
    },
    "read_storage": lambda: [at("on_train_end", (EPOCHS - 1, EPOCHS), read_storage)],
}


def data(ranks: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH // ranks)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single_device": lambda: "single_device",
    "ddp": lambda: DDPStrategy(find_unused_parameters=True),
    "ddp_plain": DDPStrategy,
    "fsdp": FSDPStrategy,
}


def fit(case: str, name: str, ranks: int) -> list[float]:
    net = {"finetuning": HeadFirst, "decaying": Decaying}.get(case, Net)()
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGIES[name](),
        devices=ranks,
        max_epochs=1 if case == "replace_parameter" else EPOCHS,
        callbacks={**CASES, **REFUSED}[case](),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, data(ranks), data(ranks))
    if case in REFUSED:
        return []
    trainer.save_checkpoint(f"{name}.ckpt")
    logged = (value for key, value in trainer.callback_metrics.items() if key == "norm")
    return [*flat(f"{name}.ckpt"), *map(float, logged)]


def flat(path: str) -> list[float]:
    state = torch.load(path, weights_only=True)
    weights = state.get("state_dict") or state["net"]
    return [number for name in sorted(weights) for number in weights[name].flatten().tolist()]


def loop(name: str, ranks: int) -> list[float]:
    """A loop of one's own, which evaluates and changes weights after it."""
    lite = Lite(accelerator="cpu", strategy=STRATEGIES[name](), devices=ranks)
    lite.launch()
    net = Net()
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = lite.setup_dataloaders(data(ranks))
    for _ in range(3):
        for inputs, targets in loader:
            lite.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for inputs, _targets in loader:
                model(inputs)
        halve(net)
    lite.save(f"lite {name}.ckpt", {"net": model})
    return flat(f"lite {name}.ckpt")


def add_a_layer(net: Net) -> None:
    net.extra = nn.Linear(1, 1)
    net.trainer.optimizers[0].add_param_group({"params": list(net.extra.parameters())})


def main(name: str, ranks: int) -> None:
    if name in REFUSED:
        fit(name, "fsdp", ranks)
        return
    if name == "ddp_added":
        CASES["added"] = lambda: [at(START, (1,), add_a_layer)]
        fit("added", "ddp", ranks)
    cases = ("frozen for an epoch",) if name == "ddp_plain" else tuple(CASES)
    found = {case: fit(case, name, ranks) for case in cases}
    found["lite"] = loop(name, ranks)
    Path(f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
