# Run by test_step_hooks.py: prints the weights after training.
import json
import sys
import torch
from torch import nn
from stratagem import Module, Trainer
from stratagem.checkpoint import SingleFileCheckpointIO


class Base(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True).sin()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Own(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)
        optimizer.step(closure=optimizer_closure)

    def backward(self, loss, *args, **kwargs):
        super().backward(2 * loss, *args, **kwargs)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class Searches(Base):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=6, line_search_fn="strong_wolfe")


def trained(strategy, devices, kind):
    """Train; return the weights, as a whole and on rank 0."""
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accumulate_grad_batches=2 if kind == "own" else 1,
        gradient_clip_val=0.05 if kind == "own" else None,
    )
    model = {"own": Own, "searches": Searches}[kind]()
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, torch.utils.data.DataLoader(data, 8 // devices))
    trainer.save_checkpoint("trained.ckpt", weights_only=True)
    if not trainer.is_global_zero:
        return []
    weights = SingleFileCheckpointIO().load_checkpoint("trained.ckpt")["state_dict"].values()
    return [value for tensor in weights for value in tensor.view(-1).tolist()]


if __name__ == "__main__":
    strategy, devices, *kinds = sys.argv[1:]
    weights = [trained(strategy, int(devices), kind) for kind in kinds]
    if weights[0]:
        print(json.dumps(weights))
