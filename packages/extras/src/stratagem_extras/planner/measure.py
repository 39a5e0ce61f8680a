"""Real steps of one strategy, which `stratagem plan --measure` takes in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MARK = "measured tensors: "


def measured(arguments: Sequence[str], strategy: str) -> int | str:
    """Return the bytes of tensors that rank 0 holds in a real step on this machine.

    Args:
        arguments: of `stratagem plan`.
        strategy: the one to run.

    Returns:
        The bytes, or the last line of the error where the strategy does not run here.
    """
    command = [sys.executable, "-m", __name__, *arguments, "--strategy", strategy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return int(json.loads(line.removeprefix(_MARK)))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def main(arguments: Sequence[str]) -> None:
    """Take two steps on every rank; rank 0 prints the memory use of the second."""
    from torch import nn

    from stratagem import Lite
    from stratagem.strategies import apply_activation_checkpointing
    from stratagem_extras.planner.command import model_and_batch, parser_of_plan
    from stratagem_extras.planner.plan import default_loss, optimizer_maker
    from stratagem_extras.planner.simulation import Workload, measure_step

    sys.path.insert(0, str(Path.cwd()))
    options = parser_of_plan().parse_args(arguments)
    build, batch = model_and_batch(options)
    lite = Lite(strategy=options.strategy[-1], devices=options.devices, precision=options.precision)
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
    main(sys.argv[1:])
