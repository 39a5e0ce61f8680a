# Run by test_storage.py.
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Net(Module):
    first = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if self.first is None:
            self.first = self.global_step
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


saver = ModelCheckpoint(sys.argv[1], "{step}", every_n_train_steps=2, save_last=True)
trainer = Trainer(
    strategy="ddp",
    devices=2,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    max_steps=int(sys.argv[2]),
    callbacks=saver,
)
model = Net()
data = DataLoader(TensorDataset(torch.arange(64.0).reshape(32, 2) / 64), batch_size=2)
trainer.fit(model, data, ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None)
if trainer.is_global_zero:
    print(model.first, saver.best_model_path, model.net.weight.tolist())
