"""Run by test_deepspeed.py on two ranks: losses of every stage beside ddp's, all in a row."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_models as models

from stratagem import Trainer
from stratagem_deepspeed.strategy import DeepSpeedStrategy

ON_CPU = {"zero_force_ds_cpu_optimizer": False}  # torch's optimizer: no op has to be built
WAYS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "stage 1": lambda: "deepspeed_stage_1",
    "stage 2": lambda: "deepspeed_stage_2",
    "stage 3": lambda: "deepspeed_stage_3",
    "stage 0": lambda: DeepSpeedStrategy(stage=0),
    "stage 1 offload": lambda: DeepSpeedStrategy(stage=1, offload_optimizer=True, config=ON_CPU),
    "stage 2 offload": lambda: DeepSpeedStrategy(stage=2, offload_optimizer=True, config=ON_CPU),
    "stage 3 offload": lambda: DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_parameters=True, config=ON_CPU
    ),
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}

linear, variables = torch.nn.functional.linear, None
out: dict[str, Any] = {"left over": []}
for run, options in RUNS.items():
    for way, strategy in WAYS.items():
        module = models.Net()
        trainer: Trainer = models.trainer(strategy(), 2, **options)
        trainer.fit(module, models.loader(2), models.loader(2, samples=24))
        again = trainer.validate(module, models.loader(2, samples=24), verbose=False)
        predicted = trainer.predict(module, models.loader(2, samples=24))
        out[f"{run}, {way}"] = {
            "losses": module.losses,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
            "again": again[0]["val_loss"],
            "predicted": torch.cat(predicted).flatten().tolist(),
        }
        if torch.nn.functional.linear is not linear:
            out["left over"].append(f"torch.nn.functional.linear after {way}")
        # The one for huge pages is set for torch, by every strategy that shards.
        now = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
        if variables is not None and now != variables:
            changed = sorted(name for name, _ in now.items() ^ variables.items())
            out["left over"].append(f"variables after {way}: {changed}")
        variables = now
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
