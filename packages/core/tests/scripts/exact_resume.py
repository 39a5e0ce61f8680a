# Run by test_exact_resume.py.
import json
import random
import sys
import numpy as np
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset
from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Augmented(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((4,), index / 48) + 0.1 * noise


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - 1).square().mean()
        self.losses.append(float(loss.detach()).hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


seed, out, ckpt_path, workers = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    max_epochs=2,
    callbacks=ModelCheckpoint(out, every_n_train_steps=1, save_top_k=-1, filename="{step}"),
)
random.seed(seed + trainer.global_rank)
np.random.seed(seed + trainer.global_rank)
torch.manual_seed(seed + trainer.global_rank)
net = Net()
loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)
trainer.fit(net, loader, ckpt_path=ckpt_path or None)
(out / f"losses{trainer.global_rank}.json").write_text(json.dumps(net.losses))
