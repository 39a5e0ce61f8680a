"""Times the plan of a Llama of 70B parameters on 64 devices, and prints what is proposed and why.

    python benchmarks/mesh_plan.py                                  # 8 nodes of 8 H100
    python benchmarks/mesh_plan.py --num-nodes 128                  # 1,024 devices
    python benchmarks/mesh_plan.py --micro-batches 32 --network 3e9 # pipelines too; slow links
    python benchmarks/mesh_plan.py --measure                        # beside real steps of 4 ranks

Nothing is allocated and nothing is trained; the time includes the start of Python. `--measure`
takes steps of a small Llama on 4 CPU ranks with the sizes that a plan proposes for it, and prints
the bytes of their tensors beside the planned ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GIB = 2**30
SEVENTY_BILLION = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    use_cache=False,
)
SMALL = LlamaConfig(
    hidden_size=256,
    intermediate_size=896,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2000,
    use_cache=False,
)


def batch(length: int) -> dict[str, torch.Tensor]:
    """Return one sequence, as models of transformers read it."""
    words = torch.ones(1, length, dtype=torch.int64)
    return {"input_ids": words, "labels": words}


def plan(options: argparse.Namespace) -> None:
    """Print the proposals for 70B, with a sentence for each size."""
    from stratagem import plan_memory

    made = plan_memory(
        lambda: LlamaForCausalLM(SEVENTY_BILLION),
        batch(8192),
        devices=8,
        num_nodes=options.num_nodes,
        device=options.device,
        precision="bf16-true",
        activation_checkpointing=True,
        accumulate_grad_batches=options.micro_batches,
        figures={} if options.network is None else {"network": options.network},
        strategies=["mesh"],
    )
    for row in made.strategies:
        if row.memory is None:
            print(f"{row.name}: {row.why_not}")
            continue
        fits = "fits" if row.fits else "does not fit"
        held = f"{row.on_device / GIB:.1f} GiB ({row.how})"
        print(f"{row.name}: {held}, {row.seconds:.2f} s a step, {fits}")
        for reason in row.reasons:
            print(f"- {reason}")
    print(f"\n{made.call}")


def measure() -> None:
    """Print the planned and the measured bytes of each proposal, and their ratio."""
    from stratagem import Lite, plan_memory
    from stratagem_extras.planner.choices import chosen
    from stratagem_extras.planner.simulation import Workload, measure_step
    from stratagem_extras.planner.training import default_loss, optimizer_maker

    is_first = "RANK" not in os.environ
    if is_first:
        made = plan_memory(
            lambda: LlamaForCausalLM(SMALL), batch(128), devices=4, strategies=["mesh"]
        )
        planned: dict[str, int] = {
            row.name: row.memory.total for row in made.strategies if row.memory is not None
        }
        os.environ["PLANNED"] = json.dumps(planned)  # the other ranks take the same steps
    planned = json.loads(os.environ["PLANNED"])
    workload = Workload(lambda: batch(128), default_loss, optimizer_maker(None))
    for name, expected in planned.items():
        lite = Lite(accelerator="cpu", strategy=chosen(name).spec.build(), devices=4)
        lite.launch()
        phases: dict[str, Any] = measure_step(
            lite.strategy, workload, lambda: LlamaForCausalLM(SMALL)
        )
        real = max(memory.total for memory in phases.values())
        if is_first:
            print(f"{name}: planned {expected}, measured {real}, ratio {expected / real:.3f}")


def main() -> None:
    """Plan, or measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-nodes", type=int, default=8)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--network", type=float, help="bytes a second to each device")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.measure:
        measure()
        return
    plan(options)
    started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    with open("/proc/self/stat", encoding="ascii") as file:  # noqa: PTH123
        ticks = int(file.read().rpartition(")")[2].split()[19])
    wall = time.time() - started - ticks / os.sysconf("SC_CLK_TCK")
    print(f"\n{wall:.1f} s since the start of Python, {time.process_time():.1f} s of a processor")


if __name__ == "__main__":
    main()
