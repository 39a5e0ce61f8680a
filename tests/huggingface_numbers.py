"""Runs an example of examples/huggingface, and writes the numbers of a converted one to files.

Run: python huggingface_numbers.py converted/run_clm.py FOLDER [arguments of the example]

An original runs under torchrun as well. Its Trainer writes trainer_state.json itself.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import stratagem
from stratagem.callbacks import Callback

script, folder = sys.argv[1], Path(sys.argv[2])


class Numbers(Callback):
    """Keeps the loss of each batch and the values of each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluations.append({n: float(v) for n, v in trainer.callback_metrics.items()})

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        numbers = {"losses": self.losses, "evaluations": self.evaluations}
        (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(numbers))


class Trainer(stratagem.Trainer):
    """Adds the callback."""

    def __init__(self, *, callbacks: Any, **options: Any) -> None:
        super().__init__(callbacks=[*callbacks, Numbers()], enable_progress_bar=False, **options)


is_original = Path(script).parent.name == "original"
torch.set_num_threads(1)
stratagem.Trainer = Trainer  # type: ignore[misc, assignment]
del sys.argv[1:3]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
if is_original and torch.distributed.is_initialized():
    # gloo aborts at times if nobody does.
    torch.distributed.destroy_process_group()
