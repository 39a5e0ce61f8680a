"""What fsdp does beside training in the Trainer, each on two ranks: `python fsdp_behaviour.py`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsdp_models import Block, Net, Network, data, early, loader, messages, mlp, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from stratagem import Lite, Module
from stratagem.strategies import FSDPStrategy
from stratagem_torch.strategies.fsdp import TAKES_UNUSED_PARAMETERS

out: dict[str, Any] = {}
weights: dict[str, Any] = {}
blocks: Any = {"auto_wrap_policy": Block}


def lite(**options: Any) -> Lite:
    lite = Lite(accelerator="cpu", strategy=FSDPStrategy(**options), devices=2)
    lite.launch()
    return lite


def steps(lite: Lite, model: Any, optimizer: Any, *schedulers: Any) -> list[float]:
    """Six steps on batches of 8; the mean loss of each."""
    inputs, targets = data(48).tensors
    losses = []
    for start in range(lite.global_rank * 4, 48, 8):
        # In float32: before torch 2.13, mse_loss has no backward of two dtypes.
        output = model(inputs[start : start + 4]).float()
        loss = mse_loss(output, targets[start : start + 4])
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(lite.all_reduce(loss.detach()).item())
    return losses


# -- an optimizer that has stepped before the model is sharded goes on with the shards
first = lite(**blocks)
rank = first.global_rank
optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
for name, kind in optimizers.items():
    net = mlp()
    made = kind([{"params": net[0].parameters(), "lr": 2e-2}, {"params": net[1:].parameters()}])
    scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    early(net, made)
    model, optimizer = first.setup(net, made)
    out[name] = steps(first, model, optimizer, scheduler)
    out[f"{name} rates"] = [group["lr"] for group in optimizer.param_groups]
    out[f"{name} sharded"] = all(
        isinstance(t, DTensor)
        for group in optimizer.param_groups
        for p in group["params"]
        for t in [p, *(s for s in optimizer.state[p].values() if s.ndim)]
    )
# What was saved is not what goes on.
saved = model.state_dict()
first.save("lite.ckpt", {"model": model, "optimizer": optimizer})
before = {name: value.clone() for name, value in saved.items()}
after = steps(first, model, optimizer)
out["saved stays"] = all(torch.equal(before[name], saved[name]) for name in before)
first.load("lite.ckpt", {"model": model, "optimizer": optimizer})
out["repeated"] = steps(first, model, optimizer) == after
loaded = torch.load("lite.ckpt")
out["keys"] = [list(loaded["model"]), list(loaded["optimizer"]["state"])]

# -- an evaluation between backward and step leaves no stale parameters behind
torch.manual_seed(0)
net = mlp()
model, optimizer = first.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
x, y = data(8).tensors
first.backward(mse_loss(model(x), y))
with torch.no_grad():
    model(x)
optimizer.step()
with torch.inference_mode():
    out["after step"] = model(x).flatten().tolist()


# -- a method of the model other than forward
class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = mlp()
        self.weight = nn.Parameter(torch.ones(1))

    def score(self, x: Tensor) -> Tensor:
        score: Tensor = self.net(x).sum() * self.weight
        return score


model = first.setup(Scored())
model.mark_forward_method("score")
first.backward(model.score(x))
out["score gradient"] = model.weight.grad.full_tensor().item()

# -- ranks that were built with different numbers begin with rank 0's
model = first.setup(Network(seed=10 + rank))
weights["seeds"] = model.state_dict()
if rank == 0:
    weights["seed 10"] = Network(seed=10).state_dict()


# -- batch norm: with checkpointing, batches count once; buffers become rank 0's to evaluate
def norm_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.0))


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.net = nn.Sequential(norm_layer(), norm_layer(), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


norm_ways: dict[str, Any] = {
    "ddp": "ddp",
    "kept": FSDPStrategy(auto_wrap_policy=20),
    "checkpointed": FSDPStrategy(
        auto_wrap_policy=20, activation_checkpointing=lambda m: isinstance(m, nn.Sequential)
    ),
}
for name, strategy in norm_ways.items():
    runs, module = trainer(strategy, 2, max_steps=6), Normed()
    runs.fit(module, loader(2))
    out[f"norm {name}"] = runs.validate(module, loader(2), verbose=False)[0]["val_loss"]
    out[f"norm {name} buffers"] = [b.flatten().tolist() for b in module.buffers()]


# -- tied weights in one group, whose group is the root's by default
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x).sum(1, keepdim=True)
        return output


tied = lite(auto_wrap_policy=20)
tied_net = Tied()
model, optimizer = tied.setup(tied_net, torch.optim.Adam(tied_net.parameters(), lr=1e-2))
out["tied"] = steps(tied, model, optimizer)
out["still tied"] = tied_net.layers[0].weight is tied_net.layers[1].weight


# -- dtypes
def dtypes(**options: Any) -> list[Any]:
    seen: list[str] = []
    half = Lite(accelerator="cpu", devices=2, **options)
    half.launch()
    net = mlp()
    model, optimizer = half.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    net[1].register_forward_hook(lambda m, i, o: seen.append(str(o.dtype)))
    losses = steps(half, model, optimizer)
    return [losses, seen[0], str(next(model.parameters()).dtype)]


out["bf16-mixed"] = dtypes(strategy="fsdp", precision="bf16-mixed")
out["bf16-true"] = dtypes(strategy="fsdp", precision="bf16-true")
out["policy"] = dtypes(strategy=FSDPStrategy(mixed_precision=torch.bfloat16, auto_wrap_policy=100))
own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
out["own policy"] = dtypes(strategy=FSDPStrategy(mixed_precision=own))

# -- compiled layers
network = Network(seed=8)
for block in network.blocks:
    block.compile(backend="eager")
compiled = lite(**blocks)
model, optimizer = compiled.setup(network, torch.optim.SGD(network.parameters(), lr=1e-2))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.compile itself looks at gradients of non-leaves
    out["compiled"] = steps(compiled, model, optimizer)
network = Network(seed=8)
model, optimizer = compiled.setup(network, torch.optim.SGD(network.parameters(), lr=1e-2))
out["not compiled"] = steps(compiled, model, optimizer)


# -- a parameter that one rank uses
class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
        self.zero = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one * self.zero).sum() if rank == 0 else self.other.sum()


class Experts(nn.Module):
    """Two layers of one size, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 1), nn.Linear(5, 1)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        total: Tensor = self.experts[expert](x).sum()
        return total


if TAKES_UNUSED_PARAMETERS:
    finds = lite(find_unused_parameters=True)
    model = finds.setup(Branches())
    finds.backward(model(x))
    out["branches"] = [p.grad.full_tensor().tolist() for p in (model.one, model.other)]
    out["branches"].append(model.zero.grad.item())


# -- parameters without a dimension, of several dtypes, and a no_backward_sync within another one
class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1 / 3, dtype=torch.float64))
        self.turn = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = torch.view_as_real(self.turn * (x.sum() + 1j))
        output: Tensor = (self.layer(x).sum().double() + real * imaginary) * self.scale
        return output


nesting = lite()
alone, scalars = Scalars(), Scalars()
scalars.load_state_dict(alone.state_dict())
model = nesting.setup(scalars)
inputs: Any = data(8).tensors[0]
part = inputs[4 * rank : 4 * rank + 4]
with nesting.no_backward_sync(model):
    with nesting.no_backward_sync(model):
        nesting.backward(model(part))
    nesting.backward(model(part))
    own_gradient = scalars.scale.grad
    assert own_gradient is not None
    out["held"] = [scalars.layer.weight.grad is None, own_gradient.item()]
nesting.backward(model(part))
for each in inputs.split(4):
    torch.autograd.backward(1.5 * alone(each))
for name, parts in (("scalars", scalars), ("scalars alone", alone)):
    held: Any = [p.grad for p in (parts.scale, parts.turn)]
    gradients = [torch.view_as_real(gradient.to(torch.complex128)) for gradient in held]
    out[name] = [gradient.tolist() for gradient in gradients]

# -- clipping returns the norm of all ranks, whatever is whole
network = Network(seed=9)
clips = lite(**blocks)
model, optimizer = clips.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
mine = slice(rank * 4, rank * 4 + 4)
out["norms"] = []
for norm_type in (2.0, float("inf")):
    clips.backward(mse_loss(model(x[mine]), y[mine]))
    norm: Any = clips.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type)
    out["norms"].append(norm.item())
    if norm_type == 2.0:
        norm = clips.clip_gradients(model, optimizer, max_norm=1.0)
        out["clipped"] = norm.item()
    optimizer.zero_grad()
clips.backward(mse_loss(model(x[mine]), y[mine]))
clips.clip_gradients(model, optimizer, clip_val=0.01)
out["largest"] = max(
    (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).abs().max().item()
    for p in network.parameters()
    if p.grad is not None
)
gradient: Any = network.first.weight.grad
gradient.to_local().fill_(float("nan"))
failures: dict[str, Callable[[], Any]] = {
    "nan": lambda: clips.clip_gradients(model, optimizer, max_norm=0.1),
}

# -- models on the meta device
with torch.device("meta"):
    on_meta = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    helpless = nn.Sequential(Network())
torch.manual_seed(11)
plain = lite()
weights["meta"] = plain.setup(on_meta).state_dict()
torch.manual_seed(11)
if rank == 0:
    not_meta = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    weights["not meta"] = not_meta.state_dict()


with torch.device("meta"):
    tied_on_meta = Tied()
plain.setup(tied_on_meta)
out["tied on meta"] = tied_on_meta.layers[0].weight is tied_on_meta.layers[1].weight


# -- what is refused on each rank
class Rebuilds(Net):
    def configure_model(self) -> None:
        self.net = Network()


rebuilding, rebuilt = trainer("fsdp", 2, max_steps=2), Rebuilds()
rebuilding.fit(rebuilt, loader(2))
gone = torch.optim.Adam(Network().parameters())
mixed = Network()
bad_weights = mlp().state_dict()
bad_weights["0.weight"] = torch.zeros(3, 3)
good = first.setup(mlp())
failures |= {
    "gone": lambda: trainer("fsdp", 2).fit(Net(optimizer=lambda m: gone), loader(2)),
    "partly gone": lambda: first.setup(
        net := mlp(), torch.optim.SGD([*net[0].parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    ),
    "tied": lambda: lite(auto_wrap_policy=nn.Linear).setup(Tied()),
    "none chosen": lambda: lite(auto_wrap_policy=nn.Conv2d).setup(mlp()),
    "none checkpointed": lambda: lite(activation_checkpointing=nn.Conv2d).setup(mlp()),
    "rebuilt": lambda: rebuilding.fit(rebuilt, loader(2)),
    "helpless": lambda: plain.setup(helpless),
    "mixed": lambda: first.setup(mixed, torch.optim.Adam(mixed.parameters(), fused=True)),
    "weights": lambda: good.load_state_dict(bad_weights),
}
hooked: Any = mlp()
marked: Any = mlp()
hooked[0].weight.register_hook(lambda gradient: gradient)
marked[0].weight.rate = 0.5
failures["hooked"] = lambda: lite().setup(hooked)
out["attribute"] = next(lite().setup(marked).parameters()).rate
differing = lite()
branches = differing.setup(Branches())
failures["differing"] = lambda: differing.backward(branches(x) * (1 if rank else 2))


def run_experts(lite: Lite, model: nn.Module) -> None:
    lite.backward(model(x, rank))


for name, options in (
    ("experts", {}),
    ("experts whole", {"sharding_strategy": "NO_SHARD"}),
    ("experts as groups", {"auto_wrap_policy": nn.Linear}),
):
    routing = lite(**options)
    routed = routing.setup(Experts())
    if name == "experts":
        for expert in (0, 1):
            routing.backward(routed(x, expert))
    failures[name] = partial(run_experts, routing, routed)
out["messages"] = dict(messages(failures))

torch.save(weights, f"weights{rank}.pt")
Path(f"out{rank}.json").write_text(json.dumps(out))
