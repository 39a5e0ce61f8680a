# Run by test_evaluate.py: a language model trained and saved. `evaluated.py STRATEGY RANKS OUT`
import sys

import torch
from evaluated_model import make_model
from torch.utils.data import DataLoader

from stratagem import Trainer
from stratagem.checkpoint import save_pretrained
from stratagem_extras.language import LanguageModule

strategy, ranks, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rows = torch.randint(3, 20, (32, 12), generator=torch.Generator().manual_seed(1))
module = LanguageModule(make_model(), lambda parameters: torch.optim.SGD(parameters, lr=0.5))
trainer = Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=strategy,
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader([{"input_ids": row, "labels": row} for row in rows], 4))
trainer.save_checkpoint(f"{out}.ckpt")
save_pretrained(trainer, f"{out}-weights")
