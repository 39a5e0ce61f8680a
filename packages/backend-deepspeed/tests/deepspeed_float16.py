"""An engine in float16: `python deepspeed_float16.py`; writes out0.json.

The processor emulates float16, which DeepSpeed refuses for its speed: here it is told otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem import Callback, Module, Trainer
from stratagem_deepspeed import preparation
from stratagem_deepspeed.strategy import DeepSpeedStrategy

preparation._cpu_has_float16 = lambda: True


class Emulating(DeepSpeedStrategy):
    def setup_environment(self) -> None:
        super().setup_environment()
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: True


class Net(Module):
    """Loses infinitely in some steps."""

    def __init__(self, overflows: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.overflows = overflows

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch) - batch).float().square().mean()
        return loss * (1e30 if batch_idx in self.overflows else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watch(Callback):
    """Notes steps, learning rate, scale and a weight after each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        engine: Any = trainer.run.require_prepared().module.engine
        scale = float(engine.optimizer.cur_scale)
        weight = float(next(module.parameters()).detach().float().sum())
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.global_step, rate, scale, weight))


def run(precision: str, stage: int, ckpt_path: Path | None = None, steps: int = -1) -> Any:
    torch.manual_seed(2)
    batches = [torch.randn(4, 8) for _ in range(6)]
    watch = Watch()
    # With hysteresis 1, each overflow halves the scale.
    strategy = Emulating(stage=stage, initial_scale_power=10, hysteresis=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        max_steps=steps,
        callbacks=watch,
        default_root_dir=Path(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net((1, 3)), batches, ckpt_path=ckpt_path)
    if steps > 0:
        trainer.save_checkpoint(Path("half.ckpt"))
    return watch.seen


out: dict[str, Any] = {
    f"{precision}, {stage}": run(precision, stage)
    for precision in ("16-mixed", "16-true")
    for stage in (1, 2, 3)
}
run("16-mixed", 2, steps=2)
out["resumed"] = run("16-mixed", 2, Path("half.ckpt"))
Path("out0.json").write_text(json.dumps(out))
