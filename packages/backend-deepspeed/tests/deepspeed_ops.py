"""Run by test_ops.py on two ranks: offload with DeepSpeed's own optimizer, and to NVMe."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_models as models

from stratagem import Module
from stratagem_deepspeed.strategy import DeepSpeedStrategy

out: dict[str, Any] = {}


class Wide(Module):
    """Large enough for DeepSpeed to write it: it leaves less than 1 MiB in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 256))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.net(batch), batch)
        self.losses.append(self.trainer.strategy.ranks.all_reduce(loss.detach()).item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if sys.argv[1] == "cpu_adam":
    for way in (
        "ddp",
        "deepspeed_stage_1_offload",
        "deepspeed_stage_2_offload",
        "deepspeed_stage_3_offload",
    ):
        for options in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}):
            module = models.Net()
            trainer = models.trainer(way, 2, **options)
            trainer.fit(module, models.loader(2))
            out[f"{way} {len(options)}"] = module.losses
            out[f"{way} optimizer"] = type(trainer.optimizers[0]).__name__
else:
    folder = Path("swapped").resolve()
    folder.mkdir(exist_ok=True)
    for name, precision, optimizer, parameters in (
        ("cpu", "32-true", "cpu", "cpu"),
        ("optimizer", "32-true", "nvme", "cpu"),
        ("cpu in bf16", "bf16-mixed", "cpu", "cpu"),
        ("both in bf16", "bf16-mixed", "nvme", "nvme"),
    ):
        swapped = folder / name.replace(" ", "_")
        swapped.mkdir(exist_ok=True)
        wide = Wide()
        strategy = DeepSpeedStrategy(
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
            offload_optimizer_device=optimizer,
            offload_params_device=parameters,
            nvme_path=swapped,
        )
        trainer = models.trainer(strategy, 2, precision=precision, max_steps=5)
        generator = torch.Generator().manual_seed(5)
        trainer.fit(wide, [torch.randn(4, 256, generator=generator) for _ in range(5)])
        trainer.strategy.ranks.barrier()
        files = [f for f in swapped.rglob("*") if f.is_file()]
        out[name] = wide.losses
        out[f"{name} files"] = len(files)
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
