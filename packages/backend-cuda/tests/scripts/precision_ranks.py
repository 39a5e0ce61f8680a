"""float8 or MXFP8, and nf4, on two ranks: `python precision_ranks.py NAME`; JSON to its end."""

import contextlib
import json
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.strategies import DDPStrategy, FSDPStrategy
from stratagem_cuda.precision import BitsandbytesPrecision, Float8Precision, MXFP8Precision

out = {}
kind = {"float8": Float8Precision, "mxfp8": MXFP8Precision}[sys.argv[1]]


def network(seed):
    torch.manual_seed(seed)
    hidden = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Linear(32, 32), *hidden, nn.Linear(32, 16))


def steps(lite, model, optimizer):
    inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
    losses = []
    for start in range(lite.global_rank * 4, 32, 8):
        batch = inputs[start : start + 4]
        loss = mse_loss(model(batch), batch[:, :16])
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(lite.all_reduce(loss.detach()).item())
    return losses


strategies = {"ddp": DDPStrategy(), "fsdp": FSDPStrategy(auto_wrap_policy=nn.Sequential)}
for name, strategy in strategies.items():
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy, plugins=kind(emulate=True))
    lite.launch()
    net = network(lite.global_rank)  # rank 0's weights count
    model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    out[f"{name} converted"] = sum("8Linear" in type(part).__name__ for part in net.modules())
    out[name] = steps(lite, model, optimizer)
    lite.save(f"{name}.ckpt", {"model": model, "optimizer": optimizer})
    # Rank 0 alone has all of a sharded model's state.
    out[f"{name} names"] = list(model.state_dict()) == list(network(0).state_dict())

# What one strategy has saved, the other loads.
net = network(7)
model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
lite.load("ddp.ckpt", {"model": model, "optimizer": optimizer})
out["ddp to fsdp"] = steps(lite, model, optimizer)
net = network(7)
model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
lite.load("fsdp.ckpt", {"model": model, "optimizer": optimizer})
out["fsdp to fsdp"] = steps(lite, model, optimizer)

# Built in shards, it draws the values of one process.
with lite.init_module():
    net = network(0)
model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
out["fsdp built in shards"] = steps(lite, model, optimizer)


def trained(lite, net):
    model = lite.setup(net)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return model, lite.setup_optimizers(torch.optim.SGD(weights, lr=1e-2))


# Quantised weights are frozen, and those of rank 0 like any others; fsdp divides them.
strategies = {"ddp": DDPStrategy(), "fsdp": FSDPStrategy(auto_wrap_policy=nn.Sequential)}
for name, strategy in strategies.items():
    precision = BitsandbytesPrecision("nf4-dq", dtype=torch.float32, ignore_modules={"3"})
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy, plugins=precision)
    lite.launch()
    net = network(lite.global_rank)
    model, optimizer = trained(lite, net)
    packed = net[0].weight
    local = packed.to_local() if isinstance(packed, DTensor) else packed
    out[f"nf4 {name} bytes"] = local.nbytes
    out[f"nf4 {name}"] = steps(lite, model, optimizer)
    if name == "ddp":
        sums = torch.stack([value.double().sum() for value in model.state_dict().values()])
        out["nf4 alike"] = bool((lite.all_gather(sums) == sums).all())
    lite.save(f"nf4 {name}.ckpt", {"model": model})
for name in strategies:
    model, optimizer = trained(lite, network(7))
    lite.load(f"nf4 {name}.ckpt", {"model": model})
    out[f"nf4 {name} to fsdp"] = steps(lite, model, optimizer)

for mode in ("fp4", "int8", "int8-training"):
    for name in ("ddp", "fsdp"):
        precision = BitsandbytesPrecision(mode, ignore_modules={"3"})
        lite = Lite(accelerator="cpu", devices=2, strategy=name, plugins=precision)
        lite.launch()
        out[f"{mode} {name}"] = steps(lite, *trained(lite, network(0)))


def large():
    torch.manual_seed(3)
    hidden = nn.ModuleList(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(5))
    return nn.Sequential(*hidden, nn.Linear(2048, 8))


# A weight that a build has put away is whole while it is quantised.
precision = BitsandbytesPrecision("nf4", dtype=torch.float32, ignore_modules={"5"})
lite = Lite(accelerator="cpu", devices=2, strategy=FSDPStrategy(), plugins=precision)
lite.launch()
outputs = []
for context in (contextlib.nullcontext(), lite.init_module()):
    with context:
        net = large()
    model = lite.setup(net)
    with torch.no_grad():
        outputs.append(model(torch.ones(2, 2048)))
out["nf4 built in shards"] = torch.equal(*outputs) and bool(outputs[0].isfinite().all())
if lite.is_global_zero:
    print(json.dumps(out))
    sys.stdout.flush()
