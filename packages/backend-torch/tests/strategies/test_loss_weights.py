"""Losses that are means over different numbers of tokens, under each strategy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parents[1] / "scripts" / "loss_weights.py"


TRIED = [("single_device", 1, 5), ("ddp", 2, 2), ("fsdp", 2, 4), ("ddp_sharded", 2, 1)]
SEVERAL = ("ddp", "fsdp", "ddp_sharded", "model_parallel")
MATRIX = [("single_device", 1), *((name, ranks) for name in SEVERAL for ranks in (2, 4))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        *TRIED,
        *(
            pytest.param(name, ranks, accumulate, marks=pytest.mark.long)
            for name, ranks in MATRIX
            for accumulate in (1, 2, 4)
        ),
    ],
)
def test_loss_weight_gives_the_mean_over_all_tokens_of_a_step(
    strategy: str, ranks: int, accumulate: int, tmp_path: Path
) -> None:
    """Two epochs with clipping equal one process that concatenates the batches of each step.

    Some batches have no valid token, so that their loss is NaN. The last step of an epoch is
    smaller where `accumulate` does not divide the batches.
    """
    run_file(SCRIPT, strategy, str(ranks), str(accumulate), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    expected = found.pop("reference")
    assert found.keys() == {"trainer", "lite", "step"}
    for name, weights in found.items():
        assert weights == pytest.approx(expected, rel=0, abs=1e-6), name


UNEVEN = """
import torch
from stratagem import Lite
from stratagem.errors import ConfigurationError

lite = Lite(accelerator="cpu", devices=2, strategy="ddp")
lite.launch()
data = [[torch.ones(1, 2), 2 * torch.ones(3, 2), 3 * torch.ones(2, 2)], [4 * torch.ones(5, 2)]]


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def loss_of(net):
    return lambda batch: net(batch).square().mean()


net = network()
model, _ = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
for batch in lite.join_uneven_inputs(data[lite.global_rank]):
    lite.step(model, [batch], loss_of(model), weights=[len(batch)])
raw = network()
optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
for batch in (torch.cat([data[0][0], data[1][0]]), *data[0][1:]):
    loss_of(raw)(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.testing.assert_close(net.weight, raw.weight, rtol=0, atol=1e-6)
for batch in lite.join_uneven_inputs(data[lite.global_rank]):
    try:
        lite.step(model, [batch, batch], loss_of(model))
    except ConfigurationError as error:
        print(error, flush=True)
        break
"""


@pytest.mark.slow
def test_a_step_of_uneven_inputs_weighs_each_element_once(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    said = run_script(UNEVEN).stdout
    assert (
        "step() within lite.join_uneven_inputs() received 2 micro-batches, and each batch" in said
    )
