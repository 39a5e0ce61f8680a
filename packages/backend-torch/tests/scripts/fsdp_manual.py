"""Run by test_fsdp_manual.py: a GAN with manual optimization under FSDP2 beside one process.

`python fsdp_manual.py RANKS`. Each rank writes what it found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fsdp_models import messages
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.strategies import FSDPStrategy, ModelParallelStrategy

ranks = int(sys.argv[1])
STEPS = 6


def layers(outputs: int) -> nn.Sequential:
    middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.Linear(8, outputs))


class Perceptual(nn.Module):
    """Calls the critic, which the Module calls too, and has parameters of its own."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic, self.mix = critic, nn.Linear(1, 2)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mix(self.critic(x)) * self.weight
        return output


class Gan(Module):
    """Parts in a list, a part in another part, a tied weight, parameters of the Module itself."""

    def __init__(self, *, deferred: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator: Any = None
        self.norms: list[float] = []
        if not deferred:
            self.configure_model()

    def configure_model(self) -> None:
        if self.generator is not None:
            return
        torch.manual_seed(1)
        self.generator, self.critic = layers(4), layers(1)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.blocks[1].weight = self.blocks[0].weight
        self.perceptual = Perceptual(self.critic)
        self.shift = nn.Parameter(torch.zeros(3, 2))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def fake(self, x: Tensor) -> Tensor:
        output: Tensor = self.generator(x) + self.shift.sum() + self.empty.sum()
        for block in self.blocks:
            output = block(output)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        generator, critic = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        if isinstance(self.generator[2], FSDPModule):
            with torch.no_grad():
                self.generator[2](torch.zeros(1, 8))  # a group, before the part that it is in
        fake = self.fake(x)
        self.toggle_optimizer(critic)
        loss = self.critic(fake.detach()).mean() - self.critic(x).mean()
        self.manual_backward(loss + self.perceptual(x).square().mean(), retain_graph=True)
        self.manual_backward(self.critic(x).square().mean())
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(inputs).sum(), inputs, create_graph=True)
        self.manual_backward(slope.square().mean())
        self.clip_gradients(critic, 0.05, "norm")
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        for half in x.chunk(2):
            loss = -self.critic(self.fake(half)).mean() * self.temperature
            self.manual_backward(loss / 2)
        self.norms.append(float(self.generator[0].weight.grad.norm()))
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        scheduler.step()
        self.log("loss", loss.detach(), on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.critic(self.fake(batch[0])).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.fake(batch[0])

    def configure_optimizers(self) -> Any:
        of_critic = [*self.critic.parameters(), *self.perceptual.mix.parameters()]
        of_critic.append(self.perceptual.weight)
        others = [p for p in self.parameters() if all(p is not one for one in of_critic)]
        generator = torch.optim.AdamW(others, 1e-2)
        critic = torch.optim.SGD(of_critic, 0.1, momentum=0.5)
        return [generator, critic], [torch.optim.lr_scheduler.StepLR(generator, 2, 0.5)]


DATA = torch.randn(12 * STEPS, 4, generator=torch.Generator().manual_seed(2))


def loader(world_size: int) -> Any:
    return DataLoader(torch.utils.data.TensorDataset(DATA), 12 // world_size)


def trainer(strategy: Any, world_size: int, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        **{"max_epochs": 1, **options},
    )


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    pairs = [(found[name], expected[name]) for name in expected if expected[name].numel()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def train_alone() -> None:
    """Write what one process finds; called before the ranks are started."""
    module, runs = Gan(), trainer("single_device", 1)
    runs.fit(module, loader(1), loader(1))
    found = {"parameters": values(module), "norms": module.norms}
    found["value"] = float(runs.callback_metrics["value"])
    found["predicted"] = torch.cat(runs.predict(module, loader(1)))  # type: ignore[arg-type]
    runs.save_checkpoint("one.ckpt")
    found["later"] = resume_alone("one.ckpt")
    torch.save(found, "one.pt")


def resume_alone(checkpoint: str) -> dict[str, Tensor]:
    """Train for another epoch in this process; return the parameters."""
    module = Gan()
    with mock.patch.dict(os.environ, STRATAGEM_CLUSTER="none"):
        trainer("single_device", 1, max_epochs=2).fit(module, loader(1), ckpt_path=checkpoint)
    return values(module)


if not Path("one.pt").exists():
    train_alone()
one: dict[str, Any] = torch.load("one.pt")
ways: dict[str, Any] = {
    "fsdp": FSDPStrategy(),
    "groups": FSDPStrategy(auto_wrap_policy={nn.Sequential}, state_dict_type="sharded"),
    "mesh": ModelParallelStrategy(tensor_parallel_size=1),
    "deferred": FSDPStrategy(cpu_offload=True),
}
out: dict[str, Any] = {}
for name, strategy in ways.items():
    module = Gan(deferred=name == "deferred")
    many = trainer(strategy, ranks)
    many.fit(module, loader(ranks), loader(ranks))
    found: dict[str, Any] = {"parameters": largest(values(module), one["parameters"])}
    found["roots"] = [n for n, part in module.named_modules() if isinstance(part, FSDPModule)]
    found["whole"] = [n for n, p in module.named_parameters() if not isinstance(p, DTensor)]
    found["norms"] = max(abs(a - b) for a, b in zip(module.norms, one["norms"], strict=True))
    found["value"] = abs(float(many.callback_metrics["value"]) - one["value"])
    own = torch.cat(many.predict(module, loader(ranks)))  # type: ignore[arg-type]
    found["predicted"] = float((own - one["predicted"][many.global_rank :: ranks]).abs().max())
    many.save_checkpoint(f"{name}.ckpt")
    for source in (f"{name}.ckpt", "one.ckpt"):
        later = Gan(deferred=name == "deferred")
        trainer(strategy, ranks, max_epochs=2).fit(later, loader(ranks), ckpt_path=source)
        found[f"from {source}"] = largest(values(later), one["later"])
    out[name] = found
    if many.is_global_zero:
        found["in one process"] = largest(resume_alone(f"{name}.ckpt"), one["later"])


class Plain(Gan):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward(loss, *args, **kwargs)


class Late(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_late() -> None:
    module = Late()
    trainer("fsdp", ranks).fit(module, loader(ranks))
    module.automatic_optimization = False
    trainer("fsdp", ranks).fit(module, loader(ranks))


cases: dict[str, Any] = {
    "plain": lambda: trainer("fsdp", ranks).fit(Plain(), loader(ranks)),
    "late": fit_late,
}
out["messages"] = dict(messages(cases))
Path(f"out{many.global_rank}.json").write_text(json.dumps(out))
