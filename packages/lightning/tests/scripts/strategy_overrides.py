"""A strategy of nequip's and Ray's kind on two ranks: `strategy_overrides.py FOLDER`.

It prints the same lines with Lightning 2.6.6, where `lightning` is Lightning; they are in
`data/strategy_overrides.txt`.
"""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy


def note(*words):
    if dist.get_rank() == 0:
        print("NOTE", *words, flush=True)


class WithoutDDP(DDPStrategy):
    """Gives both ranks all of the data, and averages gradients by itself."""

    def configure_ddp(self):
        pass

    def pre_backward(self, closure_loss):
        super().pre_backward(closure_loss)
        note(f"pre {closure_loss.item():.4f}")

    def post_backward(self, closure_loss):
        super().post_backward(closure_loss)
        note(f"post {closure_loss.item():.4f}", closure_loss.requires_grad)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2

    @property
    def root_device(self):
        return torch.device("cpu", super().root_device.index)

    @property
    def distributed_sampler_kwargs(self):
        assert super().distributed_sampler_kwargs.keys() == {"num_replicas", "rank"}
        return {"num_replicas": 1, "rank": 0}

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        note("load")
        checkpoint = self.checkpoint_io.load_checkpoint(
            checkpoint_path, map_location=self.root_device, weights_only=False
        )
        checkpoint["state_dict"]["layer.bias"].zero_()
        return checkpoint


class Model(BoringModel):
    def train_dataloader(self):
        rows = torch.arange(4.0).unsqueeze(1).expand(4, 32) / 8
        return DataLoader(rows.contiguous(), batch_size=1)

    def on_train_start(self):
        note(f"bias {self.layer.bias.sum().item():.4f}")

    def training_step(self, batch, batch_idx):
        note("batch", batch[0, 0].item())
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        note(f"before {loss.item():.4f}")

    def on_after_backward(self):
        note(f"after {self.layer.bias.grad.sum().item():.4f}")


def fit(epochs, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=WithoutDDP(),
        max_epochs=epochs,
        limit_val_batches=0,
        accumulate_grad_batches=2,
        default_root_dir=sys.argv[1],
        **quiet,
    )
    model = Model()
    trainer.fit(model, **options)
    note(f"weights {model.layer.weight.sum().item():.5f}")
    return trainer


if __name__ == "__main__":
    pl.seed_everything(1)
    path = f"{sys.argv[1]}/own.ckpt"
    fit(1).save_checkpoint(path)
    fit(2, ckpt_path=path)
