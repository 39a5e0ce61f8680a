"""Writes docs/guides/choosing-a-strategy.md: which strategy fits, by size of the model and devices.

    python benchmarks/choosing_a_strategy.py docs/guides/choosing-a-strategy.md     # half an hour

Every cell is a plan of `stratagem plan`; nothing is trained.
"""

from __future__ import annotations

import platform
import sys
import warnings
from datetime import date
from functools import partial
from pathlib import Path

import torch

from stratagem import plan_memory
from stratagem_extras.planner.decoder import PlannedDecoder
from stratagem_extras.planner.plan import MemoryPlan, PlannedStrategy

GIB = 2**30
TOKENS, VOCABULARY = 2048, 32_000
HOST = 10**12
MEMORIES = (24, 80)
# Parameters, layers, width.
SIZES = {
    "100M": (1e8, 12, 640),
    "500M": (5e8, 24, 1024),
    "1B": (1e9, 24, 1536),
    "3B": (3e9, 32, 2560),
    "7B": (7e9, 32, 4096),
    "13B": (13e9, 40, 5120),
    "20B": (20e9, 44, 6144),
    "70B": (70e9, 80, 8192),
}
# Devices on a node, and nodes.
MACHINES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "64": (8, 8)}
SEVERAL = (
    "ddp",
    "ddp_sharded",
    "fsdp_shard_grad_op",
    "fsdp",
    "fsdp_cpu_offload",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
)
ONE = (
    "single_device",
    "fsdp_cpu_offload",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
)

_ALT = "Bars: ddp 2422 MB, fsdp_no_shard 1930, fsdp_shard_grad_op 1352, fsdp 1193"
PICTURE = "\n".join(
    f"![{_ALT}](../_static/pictures/memory-{kind}.svg){{.only-{kind}}}"
    for kind in ("light", "dark")
)
PAGE = """# Choose a strategy

You find the strategy and the number of devices for a model of a given size. The tables are for
a decoder.
[`stratagem plan`](planning.md) answers for your own model.

{picture}

The picture has the measured peak of a rank, of two that train 100.7 million parameters on
CPUs.

- If the model fits on one device, start with `ddp`. It is the simplest, and needs no change to the
  model.
- If it does not fit, shard it. `ddp_sharded` shards the optimizer's state, `fsdp_shard_grad_op`
  also the gradients, and `fsdp` also the parameters.
  DeepSpeed's stages 1, 2 and 3 shard the same.
- If it does not fit when it is sharded, offload to the host. Each step then takes longer.
- Between nodes, the network is slower than the links within a node, and for large models `ddp`
  waits for it. DeepSpeed sends gradients in bfloat16, which is half as many bytes. So the tables
  name its stages for many devices, also where `ddp` or `fsdp` would fit.

Then write its name: `Trainer(strategy="fsdp", devices=8)`. To compare strategies for a decoder
of your size:

```console
$ stratagem plan --parameters 5e7 --layers 4 --hidden 512 --vocabulary 32000 --sequence 512 \\
    --devices 4 --device A100-80GB --strategy ddp --strategy fsdp
```

## What fits

The tables show the first strategy that fits, and the GiB that a rank holds on its device. Of the
strategies that fit, the one with the shortest step by the device's figures comes first, then the
one that divides less. Those that offload come last. "-" means that nothing fits.

The model is a decoder with a vocabulary of {vocabulary}. A rank trains on one sequence of
{tokens} tokens at a time with AdamW, `precision="bf16-mixed"` and activation checkpointing. A
node has up to 8 devices and 1 TB of memory. At most 90% of either is filled. Without DeepSpeed,
parameters, gradients and the optimizer's state are in float32. DeepSpeed keeps parameters and
gradients in bfloat16, and a float32 copy of the parameters with the optimizer's state.

{tables}
## How much sharding saves

{savings}

## One device

{largest}

`{command}` wrote this page on
{day} with torch {torch} on {machine}. The tables are computed by `stratagem plan`;
the picture was measured.
[Plans and measurements](planning.md#on-a-gpu) of five strategies on one GPU differ by 2.1% at most.

## Next steps

- [Will it fit?](planning.md) `stratagem plan` for your model.
- [All strategies](../reference/strategies.md): what each supports.
- [Several devices](several-devices.md).
"""


def plan(size: str, machine: str, names: tuple[str, ...]) -> MemoryPlan:
    """Return the plan of a model on a machine, for devices of the larger memory."""
    parameters, layers, hidden = SIZES[size]
    devices, nodes = MACHINES[machine]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: MemoryPlan = plan_memory(
            partial(
                PlannedDecoder, parameters, layers=layers, hidden=hidden, vocabulary=VOCABULARY
            ),
            lambda: torch.zeros(1, TOKENS, dtype=torch.long),
            precision="bf16-mixed",
            devices=devices,
            num_nodes=nodes,
            device="A100-80GB",
            device_memory=f"{MEMORIES[-1]}GB",
            host_memory=HOST,
            activation_checkpointing=True,
            strategies=names,
        )
    return made


def main() -> None:
    """Make the plans and write the page."""
    plans = {}
    for size in SIZES:
        for machine in MACHINES:
            plans[size, machine] = plan(size, machine, ONE if machine == "1" else SEVERAL)
            print(size, machine, plans[size, machine].call or "nothing fits", flush=True)
    page = PAGE.format(
        picture=PICTURE,
        vocabulary=f"{VOCABULARY:,}",
        tokens=f"{TOKENS:,}",
        tables="\n".join(_table(plans, memory) for memory in MEMORIES),
        savings=_savings(plans["1B", "8"]),
        largest=_largest(plans),
        command="python benchmarks/choosing_a_strategy.py docs/guides/choosing-a-strategy.md",
        day=date.today().isoformat(),
        torch=torch.__version__,
        machine=f"{platform.machine()} CPUs",
    )
    Path(sys.argv[1]).write_text(page, encoding="utf-8")


def _table(plans: dict[tuple[str, str], MemoryPlan], memory: int) -> str:
    lines = [
        f"Devices of {memory} GB:\n",
        "| parameters | " + " | ".join(_devices(machine) for machine in MACHINES) + " |",
        "|---" * (len(MACHINES) + 1) + "|",
    ]
    for size in SIZES:
        best = [plans[size, one].best_within(memory * 10**9, HOST) for one in MACHINES]
        lines.append(f"| {size} | " + " | ".join(map(_cell, best)) + " |")
    return "\n".join(lines) + "\n"


def _devices(machine: str) -> str:
    return "1 device" if machine == "1" else f"{machine} devices"


def _cell(row: PlannedStrategy | None) -> str:
    return "-" if row is None else f"`{row.name}` {row.on_device / GIB:.1f}"


def _savings(plan: MemoryPlan) -> str:
    held = {row.name: row.on_device for row in plan.strategies if row.memory is not None}
    names = [name for name in SEVERAL if name in held and "offload" not in name and name != "ddp"]
    lines = [
        "What a rank holds of 1B parameters on 8 devices, beside the "
        f"{held['ddp'] / GIB:.1f} GiB under `ddp`:\n",
        "| strategy | GiB | less than `ddp` |",
        "|---|---|---|",
    ]
    for name in names:
        less = 1 - held[name] / held["ddp"]
        lines.append(f"| `{name}` | {held[name] / GIB:.1f} | {less:.0%} |")
    return "\n".join(lines)


def _largest(plans: dict[tuple[str, str], MemoryPlan]) -> str:
    lines = []
    for memory in MEMORIES:
        fits = [
            (size, row)
            for size in SIZES
            if (row := plans[size, "1"].best_within(memory * 10**9, HOST)) is not None
        ]
        size, row = fits[-1]
        lines.append(
            f"- On one device of {memory} GB, {size} parameters fit by `{row.name}`, with\n"
            f"  {row.on_device / GIB:.1f} GiB on the device and {row.on_host / GIB:.0f} GiB in the "
            "host's memory."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
