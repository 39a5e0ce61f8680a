"""What ranks compute that share a sequence: `python context_numbers.py RANKS`."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_models import CASES, REFUSED, Case, Encoder, batch, loss_of
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from stratagem.errors import StratagemError
from stratagem_mesh.context import collectives
from stratagem_mesh.context.collectives import ContextGroup
from stratagem_mesh.context.regions import ContextRegions


def numbers(model: nn.Module, inputs: tuple[Tensor, ...], ranks: int) -> dict[str, Tensor]:
    """Return loss and gradients, averaged over ranks, and the outputs of an evaluation."""
    loss = loss_of(model.train(), inputs)
    torch.autograd.backward(loss)
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if ranks > 1:
            dist.all_reduce(gradient)
        found[name.replace("_checkpoint_wrapped_module.", "")] = gradient / ranks
    with torch.no_grad():
        found["evaluated"] = model.eval()(*inputs)
    return found


def difference(case: Case, ranks: int) -> float:
    build, inputs, names = case
    expected = numbers(build().double(), inputs, 1)
    model = build().double()
    ContextRegions(world()).divide(model, names)
    received = numbers(model, inputs, ranks)
    return max(
        float((received[name] - whole).abs().max() / (whole.abs().max() + 1e-9))
        for name, whole in expected.items()
    )


def world() -> Any:
    return dist.group.WORLD


def refusal(case: Case) -> str:
    build, inputs, names = case
    model = build()
    try:
        ContextRegions(world()).divide(model, names)
        torch.autograd.backward(loss_of(model, inputs))
    except StratagemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def derivatives(rank: int, ranks: int) -> dict[str, float]:
    """Return how far each collective's gradient is from that of one process."""
    group = ContextGroup(world(), rank, ranks)
    torch.manual_seed(0)
    whole = torch.randn(2, 4 * ranks, 4 * ranks, 3, dtype=torch.float64)
    weight = torch.randn_like(whole)
    own = whole.clone().requires_grad_()
    found = {}

    def gradient(output: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        (result,) = torch.autograd.grad((output.sin() * weights).sum(), source)
        return result

    expected = gradient(own, weight, own)
    part = collectives.cut(own, group, 1)
    joined = collectives.gather(part, group, 1, None)
    found["cut, gather"] = gradient(joined, weight, own) - expected
    heads = collectives.exchange(collectives.cut(own, group, 1), group, 2, 1)
    received = gradient(heads, group.slice(weight, 2), own)
    # All gradients of a region count with the number of ranks; cut divides them.
    found["exchange"] = received * ranks - expected
    keys = collectives.gather_keys(collectives.cut(own, group, 1), group, 1)
    dist.barrier()
    found["gather_keys"] = gradient(keys, weight, own) - expected
    shared = collectives.share(own, group)
    found["share"] = gradient(shared, weight, own) - expected
    first = collectives.first(own * (rank + 1), group, None)
    factor = ranks if rank == 0 else 0
    found["first"] = gradient(first, weight, own) - factor * expected
    return {name: float(error.abs().max()) for name, error in found.items()}


def dropout(rank: int) -> dict[str, Any]:
    """Return what dropout drops in a region, and numbers that are drawn after it."""
    torch.manual_seed(3)
    model = Encoder(dropout=0.5)
    nn.init.zeros_(model.positions.weight)
    for layer in model.encoder.layers:  # of attention each rank drops in other heads
        layer.self_attn.dropout = 0.0
    ContextRegions(world(), check=False).divide(model, None)
    with torch.no_grad():
        output = model.train()(torch.zeros(1, 16, dtype=torch.long))
    first = torch.rand(3).tolist()
    model.eval()
    before = torch.get_rng_state()
    model(batch(16))
    return {
        "parts are equal": torch.equal(output[:, :8], output[:, 8:16]),
        "output": float(output.detach().sum()),
        "drawn after": first,
        "evaluation draws": not torch.equal(before, torch.get_rng_state()),
    }


def run(rank: int, ranks: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    out: dict[str, Any] = {"differences": {}, "messages": {}}
    for name, case in CASES.items():
        out["differences"][name] = difference(case, ranks)
    for name, case in REFUSED.items():
        out["messages"][name] = refusal(case)
    out["derivatives"] = derivatives(rank, ranks)
    out["dropout"] = dropout(rank)
    Path(f"out{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = str(listener.getsockname()[1])
    start: Any = spawn
    start(run, (count, free), nprocs=count)
