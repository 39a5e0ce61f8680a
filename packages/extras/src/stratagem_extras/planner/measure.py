"""Real steps of one strategy, which `stratagem plan --measure` takes in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stratagem_extras.planner.plan import MemoryPlan

_MARK = "measured tensors: "


@dataclass(frozen=True)
class Measurement:
    """A real step of a strategy on this machine, beside the plan for this machine.

    Attributes:
        accelerator: where the step ran.
        predicted: the planned bytes of rank 0, in its device and its host together; 0: no plan.
        measured: the bytes of tensors that it held; 0: the step did not run.
        ratio: predicted over measured; None: the step did not run.
        why_not: why the step did not run; "".
    """

    accelerator: str
    predicted: int = 0
    measured: int = 0
    ratio: float | None = None
    why_not: str = ""


def measure_plan(here: MemoryPlan, arguments: Sequence[str]) -> dict[str, Measurement]:
    """Return a measurement for each strategy of a plan, by its name.

    Args:
        here: a plan for this machine.
        arguments: of `stratagem plan`.
    """
    found = {}
    for row in here.strategies:
        predicted, real = 0, row.why_not
        if row.memory is not None:
            predicted, real = row.memory.total, _obstacle(here, row.memory.total)
        result = real or measured(arguments, row.name, here.accelerator)
        if isinstance(result, str):
            found[row.name] = Measurement(here.accelerator, predicted, why_not=result)
        else:
            ratio = predicted / result
            found[row.name] = Measurement(here.accelerator, predicted, result, ratio)
    return found


def _obstacle(here: MemoryPlan, predicted: int) -> str:
    """Return why a step must not be tried; ""."""
    if here.num_nodes > 1:
        return "it takes several nodes"
    if here.host is None or predicted * here.devices > here.host / 2:
        return "it would fill more than half of this machine's memory"
    return ""


def measured(arguments: Sequence[str], strategy: str, accelerator: str) -> int | str:
    """Return the bytes of tensors that rank 0 holds in a real step on this machine.

    Args:
        arguments: of `stratagem plan`.
        strategy: the one to run.
        accelerator: where to run it.

    Returns:
        The bytes, or the last line of the error where the strategy does not run here.
    """
    command = [sys.executable, "-m", __name__, accelerator, *arguments, "--strategy", strategy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return int(json.loads(line.removeprefix(_MARK)))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def main(accelerator: str, arguments: Sequence[str]) -> None:
    """Take two steps on every rank; rank 0 prints the memory use of the second."""
    from torch import nn

    from stratagem import Lite
    from stratagem.strategies import apply_activation_checkpointing
    from stratagem_extras.planner.choices import chosen
    from stratagem_extras.planner.command import model_and_batch, parser_of_plan
    from stratagem_extras.planner.simulation import Workload, measure_step
    from stratagem_extras.planner.training import default_loss, optimizer_maker

    sys.path.insert(0, str(Path.cwd()))
    options = parser_of_plan().parse_args(arguments)
    build, batch = model_and_batch(options)
    name = options.strategy[-1]
    choice = chosen(name)
    lite = Lite(
        accelerator=accelerator,
        strategy=choice.spec.build() if choice.arguments else name,
        devices=options.devices,
        precision=options.precision,
    )
    lite.launch()

    def model() -> nn.Module:
        made: nn.Module = build()
        apply_activation_checkpointing(made, options.activation_checkpointing)
        return made

    workload = Workload(
        lambda: lite.to_device(batch()),
        default_loss,
        optimizer_maker(options.optimizer),
        options.accumulate_grad_batches,
    )
    phases = measure_step(lite.strategy, workload, model)
    if lite.is_global_zero:
        print(_MARK + json.dumps(max(memory.total for memory in phases.values())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
