"""Run by test_deepspeed.py on two ranks: each strategy goes on where each other one stopped."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_models as models

WAYS = ("ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")

out: dict[str, Any] = {}
for way in WAYS:
    module = models.Net()
    trainer = models.trainer(way, 2, max_steps=10)
    trainer.fit(module, models.loader(2))
    trainer.save_checkpoint(f"{way}.ckpt")
    module = models.Net()
    models.trainer(way, 2).fit(module, models.loader(2))
    out[way] = module.losses[10:]
for saved in WAYS:
    for way in WAYS:
        module = models.Net(seed=9)
        trainer = models.trainer(way, 2)
        trainer.fit(module, models.loader(2), ckpt_path=f"{saved}.ckpt")
        out[f"{saved} -> {way}"] = module.losses
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
