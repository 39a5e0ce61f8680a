# Run by test_sync_batchnorm.py.
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer
from stratagem.strategies import DDPStrategy

generator = torch.Generator().manual_seed(1)
out = {}


def layer(kind, dtype=torch.float32, **arguments):
    torch.manual_seed(3)
    made = kind(4, dtype=dtype, **arguments)
    if made.affine:
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    return made


class Alone(Lite):
    # The layer without DDP around it, so that gradients are this rank's own.
    def distances(self, kind, shape, sizes, offset=0.0, dtype=torch.float32, **arguments):
        reference, mine = layer(kind, dtype, **arguments), layer(kind, dtype, **arguments)
        self.strategy.synchronize_batch_norm(holder := nn.Sequential(mine))
        assert holder[0] is mine and list(mine.state_dict()) == list(reference.state_dict())
        rank, worst = self.global_rank, {}
        for _ in range(3):
            x = torch.randn(sum(sizes), 4, *shape, generator=generator, dtype=dtype) + offset
            weights = torch.randn(x.shape, generator=generator, dtype=dtype)
            first = sum(sizes[:rank])
            part = slice(first, first + sizes[rank])
            whole, own = x.clone().requires_grad_(), x[part].clone().requires_grad_()
            expected, found = reference(whole), mine(own)
            (expected * weights).sum().backward()
            (found * weights[part]).sum().backward()
            compared = {
                "output": (expected[part], found),
                "gradient of the input": (whole.grad[part], own.grad),
            }
            for name, p in mine.named_parameters():
                dist.all_reduce(p.grad)
                compared[name] = (getattr(reference, name).grad, p.grad)
            for name, b in mine.named_buffers():
                compared[name] = (getattr(reference, name), b)
            for name, (a, b) in compared.items():
                assert a.dtype == b.dtype, name
                distance = (a.detach() - b.detach()).abs().max().item() if b.numel() else 0.0
                worst[name] = max(worst.get(name, 0.0), distance)
            mine.zero_grad()
            reference.zero_grad()
        mine.eval()
        reference.eval()
        worst["evaluation"] = (
            (reference(x[part]) - mine(x[part])).abs().max().item()
            if len(x[part]) and mine.running_mean is not None
            else 0.0
        )
        return worst


lite = Alone(accelerator="cpu", strategy="ddp", devices=2)
lite.launch()
check = lite.distances
out["layers"] = {
    "1d": check(nn.BatchNorm1d, (), (4, 4)),
    "1d, (N, C, L)": check(nn.BatchNorm1d, (3,), (4, 4)),
    "2d": check(nn.BatchNorm2d, (3, 2), (4, 4)),
    "3d": check(nn.BatchNorm3d, (2, 3, 2), (2, 2)),
    "uneven": check(nn.BatchNorm2d, (3, 2), (5, 3)),
    "nothing on rank 1": check(nn.BatchNorm1d, (), (4, 0)),
    "one sample each": check(nn.BatchNorm1d, (), (1, 1)),
    "no momentum": check(nn.BatchNorm1d, (), (4, 4), momentum=None),
    "not affine": check(nn.BatchNorm1d, (), (4, 4), affine=False),
    "no running statistics": check(nn.BatchNorm1d, (), (4, 4), track_running_stats=False),
    "torch's own SyncBatchNorm": None,
    "float64": check(nn.BatchNorm1d, (), (4, 4), dtype=torch.float64),
}
out["large mean"] = check(nn.BatchNorm1d, (), (16, 16), offset=100.0)


class Shifted(nn.BatchNorm1d):
    # A user's subclass that does not touch the forward.
    def extra_repr(self):
        return "shifted"


out["layers"]["subclass"] = check(Shifted, (), (4, 4))
synced = nn.SyncBatchNorm(4, eps=0.0)
try:
    lite.setup(nn.Sequential(synced))
except Exception as error:
    out["torch's on the CPU"] = f"{type(error).__name__}: {error}"
lite.strategy.synchronize_batch_norm(nn.Sequential(synced))
side = 2.0 * lite.global_rank - 1.0  # -1 on rank 0, 1 on rank 1: mean 0, variance 1
out["layers"]["torch's own SyncBatchNorm"] = {
    "training": (synced(torch.full((3, 4, 2), side)) - side).abs().max().item()
}
half = layer(nn.BatchNorm1d)
lite.strategy.synchronize_batch_norm(nn.Sequential(half))
out["half"] = str(half(torch.randn(4, 4, dtype=torch.bfloat16)).dtype)
group = [dist.new_group([0]), dist.new_group([1])][lite.global_rank]
alone, plain = layer(nn.BatchNorm1d), layer(nn.BatchNorm1d)
alone.process_group = group
lite.strategy.synchronize_batch_norm(nn.Sequential(alone))
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(lite.global_rank))
out["group of one"] = torch.equal(alone(x), plain(x))
single = layer(nn.BatchNorm1d)
lite.strategy.synchronize_batch_norm(nn.Sequential(single))
try:
    single(torch.ones(1 - lite.global_rank, 4))
except ValueError as error:
    out["one value"] = str(error).split(", got")[0]

# -- a whole run: batches of 4 and 4 are one of 8
inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.prod(1, keepdim=True))


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.BatchNorm1d(8)
        self.net = nn.Sequential(nn.Linear(5, 8), self.norm, nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(**arguments):
    net = Net()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=3, **quiet, **arguments)
    trainer.fit(net, DataLoader(data, batch_size=4))
    return net.state_dict()


class Loop(Lite):
    def run(self):
        net = Net()
        model, optimizer = self.setup(net, net.configure_optimizers())
        batches = self.setup_dataloaders(DataLoader(data, batch_size=4))
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad()
                self.backward(model.training_step(batch, 0))
                optimizer.step()
        return net.state_dict()


weights = {
    "trainer": fit(strategy="ddp", sync_batchnorm=True),
    "sharded": fit(strategy="ddp_sharded", sync_batchnorm=True),
    "strategy": fit(strategy=DDPStrategy(sync_batchnorm=True)),
    "lite": Loop("cpu", DDPStrategy(sync_batchnorm=True), devices=2).run(),
    "without": fit(strategy="ddp"),
}
torch.save(weights, f"weights{lite.global_rank}.pt")
Path(f"out{lite.global_rank}.json").write_text(json.dumps(out))
