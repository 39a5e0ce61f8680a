"""Run by test_deepspeed.py on three ranks: ranks without a batch follow others at stage 3.

Only some ranks evaluate, then all of them train. Each rank writes the largest differences of
outputs and of parameters from one process.
"""

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_models import Block

from stratagem import Lite
from stratagem_deepspeed.strategy import DeepSpeedStrategy

ORDERS = (0, 1, 2), (2, 0, 0, 3), (1,), ()
INPUTS = torch.randn(12 * 3, 5, generator=torch.Generator().manual_seed(1))
MEMBERS = (1, 1, 2)


class Returns(nn.Module):
    """Returns its parameter, which the model uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self) -> Tensor:
        return self.weight


class Net(nn.Module):
    """Blocks that an input chooses; a frozen one; parameters that other modules use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(4)])
        self.outside = nn.Linear(7, 7)
        self.returns = Returns()
        self.last = nn.Linear(7, 1)
        self.shift = nn.Parameter(torch.zeros(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        x = linear(linear(x, self.outside.weight), self.returns())
        output: Tensor = self.last(x) + self.shift.sum()
        return output


class Channel:
    """Carries numbers by the store."""

    number = 0

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


class Alone(Channel):
    def announce(self, number: int) -> None:
        pass


def evaluate(lite: Lite, model: Any, members: int, channel: Channel) -> list[Tensor]:
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


def run(lite: Lite, channel: Channel) -> Any:
    """Evaluate and train in turns; return the outputs, the last ones after all training."""
    net = Net()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.02)
    model, optimizer = lite.setup(net, optimizer)
    part, parts = lite.strategy.ranks.data_split
    outputs = []
    for step, members in enumerate(MEMBERS):
        # The first time, nothing was trained or evaluated before.
        outputs.append(evaluate(lite, model, members, channel))
        own = INPUTS[12 * step : 12 * step + 12][part::parts]
        lite.backward(mse_loss(model(own), own.sum(1, keepdim=True)), model=model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs.append([model(INPUTS)])
    return outputs


def largest(pairs: Any) -> float:
    return max([float((a - b).abs().max()) for a, b in pairs], default=0.0)


alone = Lite("cpu")
alone.launch()
expected = run(alone, Alone())
gathers_each: Any = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
ways = {
    "stage 2": DeepSpeedStrategy(stage=2),
    "stage 3": DeepSpeedStrategy(stage=3, config=gathers_each),
    "stage 3, small ones kept": DeepSpeedStrategy(stage=3),
    "stage 3 offload": DeepSpeedStrategy(stage=3, offload_parameters=True, config=gathers_each),
}
out: dict[str, Any] = {}
channel = Channel()
for name, strategy in ways.items():
    lite = Lite("cpu", strategy=strategy, devices=3)
    lite.launch()
    found = run(lite, channel)
    assert [len(one) for one in found[:-1]] == [
        len(ORDERS) * (lite.global_rank < members) for members in MEMBERS
    ]
    both = [zip(*pair) for pair in zip(found, expected, strict=True) if pair[0]]  # noqa: B905
    out[name] = largest(chain.from_iterable(both))
Path(f"out{dist.get_rank()}.json").write_text(json.dumps(out))
