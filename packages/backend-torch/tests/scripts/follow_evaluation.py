"""Run by test_fsdp.py: ranks without a batch follow the forward passes of rank 0 under FSDP2.

Four ranks. In each case only some of them evaluate, then all of them train. Each rank writes the
largest differences of outputs and parameters from one process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.strategies import Compilation, FSDPStrategy, ModelParallelStrategy


class Net(nn.Module):
    """Blocks that an input chooses, one of them several times; a frozen one; one never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(4)])
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        output: Tensor = self.last(x) * self.scale
        return output


ORDERS = (0, 1, 2), (2, 0, 0, 3), (1,), ()
INPUTS = torch.randn(12 * 3, 5, generator=torch.Generator().manual_seed(1))


class Channel:
    """Carries numbers by the store."""

    def __init__(self) -> None:
        self.number = 0

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    def announce(self, number: int) -> None:
        self.store.set(f"numbers/{self.number}", str(number))
        self.number += 1

    def announced(self) -> Iterator[int]:
        while (number := int(self.store.get(f"numbers/{self.number}"))) >= 0:
            self.number += 1
            yield number
        self.number += 1


def evaluate(lite: Lite, model: Any, members: int, channel: Channel) -> list[Tensor]:
    """Run forward passes on the first ranks; the others follow rank 0."""
    prepared, found = model.prepared, []
    model.eval()
    with torch.inference_mode(), lite.strategy.evaluation(prepared):
        if lite.global_rank == 0:
            with lite.strategy.lead_evaluation_step(prepared, channel.announce):
                found = [model(INPUTS[:3], order) for order in ORDERS]
            channel.announce(-1)
        elif lite.global_rank < members:
            found = [model(INPUTS[:3], order) for order in ORDERS]
            list(channel.announced())
        else:
            lite.strategy.follow_evaluation_step(prepared, channel.announced())
    model.train()
    return found


def run(
    lite: Lite, members: tuple[int, ...], channel: Channel, *, is_compiled: bool = False
) -> Any:
    """Evaluate and train in turns; return the outputs and the trained state."""
    net = Net()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.02)
    model, optimizer = lite.setup(net, optimizer)
    if is_compiled:
        model.prepared.compile(Compilation(arguments={"backend": "eager"}))
    part, parts = lite.strategy.ranks.data_split
    outputs = []
    for step, number in enumerate(members):
        # The first time, nothing was trained or evaluated before.
        outputs.append(evaluate(lite, model, number, channel))
        own = INPUTS[12 * step : 12 * step + 12][part::parts]
        optimizer.zero_grad()
        lite.backward(mse_loss(model(own), own.sum(1, keepdim=True)))
        optimizer.step()
    return outputs, model.state_dict()


class Alone(Channel):
    def announce(self, number: int) -> None:
        pass


def divide(model: nn.Module, device_mesh: DeviceMesh) -> None:
    for part in model.modules():
        if isinstance(part, Block):
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(part, device_mesh["tensor_parallel"], plan)


def largest(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max([float((a - b).abs().max()) for a, b in pairs], default=0.0)


alone = Lite("cpu")
alone.launch()
expected, state = run(alone, (1, 1, 1), Alone())
ways: dict[str, Any] = {
    "prefetch": FSDPStrategy(auto_wrap_policy=Block, forward_prefetch=True),
    "kept": FSDPStrategy(auto_wrap_policy=Block, sharding_strategy="SHARD_GRAD_OP"),
    "offload": FSDPStrategy(auto_wrap_policy=Block, cpu_offload=True),
    "checkpointed": FSDPStrategy(auto_wrap_policy=Block, activation_checkpointing=True),
    "compiled": FSDPStrategy(auto_wrap_policy=Block),
    "hybrid": FSDPStrategy(
        auto_wrap_policy=Block, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)
    ),
    "reshard 2": FSDPStrategy(auto_wrap_policy=Block, reshard_after_forward=2),
    "tensor": ModelParallelStrategy(
        tensor_parallel_size=2, parallelize_fn=divide, auto_wrap_policy=Block
    ),
}
out: dict[str, Any] = {}
channel = Channel()
for name, strategy in ways.items():
    lite = Lite("cpu", strategy=strategy, devices=4)
    lite.launch()
    members = (2, 2, 2) if name == "tensor" else (1, 1, 3)
    with warnings.catch_warnings():
        if name == "compiled":
            warnings.simplefilter("ignore")  # torch.compile looks at gradients of non-leaves
        found, trained = run(lite, members, channel, is_compiled=name == "compiled")
    assert [len(one) for one in found] == [
        len(ORDERS) * (lite.global_rank < number) for number in members
    ]
    outputs = [zip(*both) for both in zip(found, expected, strict=True) if both[0]]  # noqa: B905
    out[name] = [
        largest(chain.from_iterable(outputs)),
        largest((trained[key], state[key]) for key in trained),
    ]
Path(f"out{dist.get_rank()}.json").write_text(json.dumps(out))
