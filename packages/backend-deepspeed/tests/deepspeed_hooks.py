"""Run by test_deepspeed.py on two ranks: a Module that does pieces of its steps, beside ddp's."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_models as models
import torch

from stratagem import Callback
from stratagem.callbacks import EMAWeightAveraging
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import ConfigurationError, UserCodeError


class Steps(models.Net):
    """Warms its learning rate up."""

    def optimizer_step(  # type: ignore[override]
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)


class LeavesOut(models.Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer_closure = args[3]
        optimizer_closure()


class ComputesAgain(models.Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer, optimizer_closure = args[2:]
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class ClearsItself(models.Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class RunsBackward(models.Net):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss)


class Clips(models.Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1)


out: dict[str, Any] = {}
for way in ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"):
    module = Steps()
    trainer = models.trainer(way, 2, accumulate_grad_batches=2)
    trainer.fit(module, models.loader(2))
    out[way] = {"losses": module.losses, "steps": trainer.global_step}
for kind in (LeavesOut, ComputesAgain, RunsBackward, Clips, ClearsItself):
    try:
        models.trainer("deepspeed_stage_2", 2).fit(kind(), models.loader(2))
    except (ConfigurationError, UserCodeError) as error:
        out[kind.__name__] = str(error)


class Saves(Callback):
    """Saves within the run, where the weights are not their average."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint("average.ckpt")


for way in ("ddp", "deepspeed_stage_2"):
    averages = [EMAWeightAveraging(decay=0.5), Saves()]
    trainer = models.trainer(way, 2, callbacks=averages, max_steps=8)
    trainer.fit(models.Net(), models.loader(2))
    trainer.save_checkpoint("after.ckpt")  # where they are
    for when in ("average", "after"):
        saved = SingleFileCheckpointIO().load_checkpoint(f"{when}.ckpt")
        for name in ("state_dict", "current_model_state"):
            weights = sorted(saved[name].items())
            values = torch.cat([value.flatten() for _, value in weights]).tolist()
            out[f"{way} {when} {name}"] = values
try:
    averaging = EMAWeightAveraging()
    models.trainer("deepspeed_stage_3", 2, callbacks=averaging).fit(models.Net(), models.loader(2))
except ConfigurationError as error:
    out["EMAWeightAveraging"] = str(error)
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
