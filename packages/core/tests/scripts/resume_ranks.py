# Run by test_resume_ranks.py.
import json
import sys
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.read = []

    def training_step(self, batch, batch_idx):
        self.read += [[self.trainer.current_epoch, sample] for sample in batch.tolist()]
        return self.net(batch.float().unsqueeze(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, devices, seed, ckpt_path=None, max_steps=-1):
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        max_epochs=2,
        max_steps=max_steps,
        callbacks=ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
    )
    torch.manual_seed(seed)
    net = Net()
    trainer.fit(net, DataLoader(range(48), batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(net.read))


for line in sys.argv[1:]:
    fit(**json.loads(line))
