"""Run by test_deepspeed.py on two ranks: what a strategy does beside the right numbers."""

import gc
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_models as models

from stratagem import Lite, Module
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_deepspeed.strategy import DeepSpeedStrategy

out: dict[str, Any] = {}


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


# ---- Lite: a hand-written loop, with and without no_backward_sync, and the optimizer made before


def loop(lite: Lite, held: bool, together: bool = True, transposed: bool = False) -> list[float]:
    inputs, targets = models.data(32).tensors
    net: Any = models.Network()
    for matrix in (p for p in net.parameters() if p.ndim == 2 and transposed):
        matrix.data = matrix.data.t().contiguous().t()
    parameters = [p for p in net.parameters() if p.requires_grad]
    if together:
        net, optimizer = lite.setup(net, torch.optim.AdamW(parameters, lr=1e-2))
    else:
        net = lite.setup(net)
        optimizer = lite.setup_optimizers(torch.optim.AdamW(parameters, lr=1e-2))
    net.mark_forward_method("loss")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rank, losses = lite.global_rank, []
    for step in range(6):
        optimizer.zero_grad()
        for part in range(3):  # three micro-batches of 2 samples on each rank
            mine = slice(
                12 * step % 24 + 4 * part + 2 * rank, 12 * step % 24 + 4 * part + 2 * rank + 2
            )
            with lite.no_backward_sync(net, enabled=held and part < 2):
                loss = net.loss(inputs[mine], targets[mine]) / 3
                lite.backward(loss, model=net)
            losses.append(float(lite.all_reduce(loss.detach())))
        optimizer.step()
        scheduler.step()
    losses.append(float(lite.all_reduce(net(inputs).detach().mean())))
    return losses


def dropped(lite: Lite) -> list[str]:
    """Return what is said where gradients are cleared that no step has used."""
    model = torch.nn.Linear(2, 1)
    model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lite.backward(model(torch.ones(1, 2)).sum(), model=model)
    said = []
    for set_to_none in (True, False):
        try:
            optimizer.zero_grad(set_to_none=set_to_none)
        except ConfigurationError as error:
            said.append(str(error))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return said


def unfrozen(lite: Lite) -> str:
    """Return what is said of a layer that is unfrozen once the engine is made."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].weight.requires_grad_(False)
    model, _ = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net[0].weight.requires_grad_(True)
    try:
        lite.backward(model(torch.ones(1, 2)).sum(), model=model)
    except ConfigurationError as error:
        return str(error)
    return ""


def frozen(lite: Lite) -> str:
    """Return what is said of a layer that is frozen once the engine is made."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    for freezes in (False, True):
        net[0].weight.requires_grad_(not freezes)
        lite.backward(model(torch.ones(1, 2)).sum(), model=model)
        try:
            optimizer.step()
        except ConfigurationError as error:
            return str(error)
    return ""


def shared(lite: Lite) -> str:
    """Return what is said of one optimizer for two models."""
    nets = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    try:
        lite.setup(*nets, optimizer)
    except ConfigurationError as error:
        return str(error)
    return ""


class Experts(nn.Module):
    """Two layers of one size, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def forward(self, x: torch.Tensor, expert: int) -> Any:
        return self.experts[expert](x).sum()


def routed(lite: Lite, alike_before: bool) -> str:
    """Return what is said where ranks use different parameters."""
    net = Experts()
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if alike_before:
        for expert in (0, 1):
            lite.backward(model(torch.ones(1, 2), expert), model=model)
            optimizer.step()
    try:
        lite.backward(model(torch.ones(1, 2), lite.global_rank), model=model)
        optimizer.step()  # stage 1 reduces here
    except UserCodeError as error:
        return str(error)
    return ""


for name, strategy in {
    "ddp": "ddp",
    "stage 1": "deepspeed_stage_1",
    "stage 2": "deepspeed_stage_2",
    "stage 3": "deepspeed_stage_3",
}.items():
    lite = Lite(accelerator="cpu", strategy=strategy, devices=2)
    lite.launch()
    out[f"lite {name}"] = loop(lite, held=True)
    out[f"lite {name}, not held"] = loop(lite, held=False)
    if name != "ddp":
        out[f"lite {name}, optimizer after"] = loop(lite, held=True, together=False)
        out[f"lite {name}, transposed"] = loop(lite, held=True, transposed=True)
        out[f"lite {name}, dropped"] = dropped(lite)
        out[f"lite {name}, unfrozen"] = unfrozen(lite)
        out[f"lite {name}, frozen"] = frozen(lite)
        out[f"lite {name}, shared"] = shared(lite)
        # DeepSpeed itself ends the process where stage 3 meets another order than before.
        out[f"lite {name}, routed"] = routed(lite, alike_before=name != "stage 3")

# ---- models that are built in shards

lite = Lite(accelerator="cpu", strategy="deepspeed_stage_3", devices=2)
lite.launch()
with lite.init_module():
    net = models.Network(seed=2 + lite.global_rank)  # rank 0's numbers are taken
# A parameter that replaces one of a layer that is done already is left to `setup`.
out["whole"] = [name for name, p in net.named_parameters() if not hasattr(p, "ds_tensor")]
out["sharded"] = {
    name: (list(p.shape), p.ds_tensor.numel(), p.ds_numel)
    for name, p in dict[str, Any](net.named_parameters()).items()
    if hasattr(p, "ds_tensor")
}
del net


def most_resident() -> float:
    """MiB: the peak since `watch_peak`."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def watch_peak() -> float:
    """Begin a peak; return MiB that are in memory now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def large() -> nn.Module:
    """192 MiB of float32."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))


before = watch_peak()
large()
out["MiB to build whole"] = most_resident() - before
before = watch_peak()
with lite.init_module():
    sharded = large()
out["MiB to build sharded"] = most_resident() - before
called, _ = lite.setup(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
before = watch_peak()
loss = called(torch.randn(4, 2048)).sum()
out["MiB to run forward"] = most_resident() - before
zero: Any = called.prepared.module.engine.optimizer
out["one copy of float32 weights"] = all(
    stepped.data_ptr() == working.data_ptr()
    for stepped, working in zip(
        zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True
    )
)
lite.backward(loss)
del sharded, called, loss, zero, _


class Plain(Module):
    """Built in configure_model, beside a layer that was built before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(lite.global_rank)
        self.before = nn.Linear(5, 5)
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = models.Network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.net.loss(self.before(x), y)
        self.losses.append(self.trainer.strategy.ranks.all_reduce(loss.detach()).item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.net.loss(self.before(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


for name in ("ddp", "deepspeed_stage_3"):
    module = Plain()
    trainer = models.trainer(name, 2)
    trainer.fit(module, models.loader(2))
    out[f"configure_model {name}"] = module.losses
    trainer.options = replace(trainer.options, max_steps=5)
    module.losses = []
    trainer.fit(module, models.loader(2))
    out[f"second fit {name}"] = module.losses
    fresh = Plain()
    evaluator = models.trainer(name, 2)
    out[f"validated {name}"] = evaluator.validate(fresh, models.loader(2), verbose=False)

# ---- optimizer and scheduler of the config

config = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10},
    },
}


class NoOptimizer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = models.Network()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.net.loss(*batch)


no_optimizer = NoOptimizer()
trainer = models.trainer(DeepSpeedStrategy(stage=2, config=config), 2)
trainer.fit(no_optimizer, models.loader(2))
out["rates"] = no_optimizer.rates
out["class of the config's optimizer"] = type(trainer.optimizers[0]).__name__

# ---- precision

for precision in ("bf16-mixed", "bf16-true"):
    for stage in (1, 2, 3):
        net_module = models.Net()
        trainer = models.trainer(DeepSpeedStrategy(stage=stage), 2, precision=precision)
        trainer.fit(net_module, models.loader(2), models.loader(2, samples=24))
        out[f"{precision} {stage}"] = net_module.losses
        out[f"{precision} {stage} dtypes"] = sorted({str(p.dtype) for p in net_module.parameters()})

# ---- activation checkpointing

for stage in (2, 3):
    net_module = models.Net()
    trainer = models.trainer(
        DeepSpeedStrategy(stage=stage, activation_checkpointing=models.Block), 2
    )
    trainer.fit(net_module, models.loader(2))
    out[f"checkpointed {stage}"] = net_module.losses

# ---- several Trainers in a row: their engines are freed, and memory stays flat


class Wide(Module):
    def __init__(self) -> None:
        super().__init__()
        width = 512
        self.net = nn.Sequential(
            nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width, bias=False)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


alive: list[Any] = []
models_alive: list[Any] = []
held: list[float] = []
for stage in (1, 2, 3, 3, 2, 3, 1, 3, 2, 3):
    wide = Wide()
    trainer = models.trainer(DeepSpeedStrategy(stage=stage), 2, max_steps=2)
    trainer.fit(wide, [torch.randn(2, 512) for _ in range(2)])
    strategy_of_stage: Any = trainer.strategy
    alive.append(weakref.ref(strategy_of_stage._engines[0].engine))
    models_alive.append(weakref.ref(wide.net))
    held.append(resident())
    del wide, trainer, strategy_of_stage
    gc.collect()
out["engines alive"] = [reference() is not None for reference in alive]
out["modules alive"] = [reference() is not None for reference in models_alive[:-1]]
out["MiB"] = held

# ---- a Trainer that goes on with another model frees the one before

out["replaced models alive"] = []
for stage in (1, 2, 3):
    wide, other = Wide(), models.Net()
    trainer = models.trainer(DeepSpeedStrategy(stage=stage), 2, max_steps=2)
    trainer.fit(wide, [torch.randn(2, 512) for _ in range(2)])
    replaced = weakref.ref(wide.net)
    del wide
    trainer.validate(other, models.loader(2), verbose=False)
    gc.collect()
    out["replaced models alive"].append(replaced() is not None)

Path(f"out{lite.global_rank}.json").write_text(json.dumps(out))
