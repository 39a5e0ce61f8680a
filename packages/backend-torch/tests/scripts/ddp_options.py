# Run by test_ddp_options.py.
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed import new_subgroups
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks as default,
    post_localSGD_hook as post_localSGD,
    powerSGD_hook as powerSGD,
)
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer
from stratagem.strategies import DDPStrategy

inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.prod(1, keepdim=True))
out = {}


class Net(Module):
    momentum = 0.9

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.spare = nn.Linear(5, 1)
        self.uses_spare = lambda batch_idx: True

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch[0]), batch[1])
        if self.uses_spare(batch_idx):
            loss = loss + 0.1 * self.spare(batch[0]).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


def trainer(strategy, **arguments):
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": 2,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **arguments,
        }
    )


def fit(strategy, uses_spare=lambda batch_idx: True, ckpt_path=None, **arguments):
    net = Net()
    net.uses_spare = uses_spare
    made = trainer(strategy, **arguments)
    made.fit(net, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return net, made


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def attempt(name, action):
    try:
        action()
        out[name] = "trained"
    except Exception as error:
        out[name] = f"{type(error).__name__}: {error}"


plain = weights(fit("ddp")[0])
lite = Lite(accelerator="cpu", strategy="ddp", devices=2)
lite.launch()


def distance(strategy, **arguments):
    net, _ = fit(strategy, **arguments)
    return float((weights(net) - plain).abs().max())


# -- the same numbers
out["equal"] = {
    "static_graph": distance(DDPStrategy(static_graph=True)),
    "gradient_as_bucket_view": distance(DDPStrategy(gradient_as_bucket_view=True)),
    "bucket_cap_mb": distance(DDPStrategy(bucket_cap_mb=1e-4)),
    "init_sync": distance(DDPStrategy(init_sync=False)),
    "broadcast_buffers": distance(DDPStrategy(broadcast_buffers=False)),
    "found": distance("ddp_find_unused_parameters_true"),
    "not searched": distance("ddp_find_unused_parameters_false"),
    "allreduce_hook": distance(DDPStrategy(ddp_comm_hook=default.allreduce_hook)),
}
net, _ = fit(DDPStrategy(broadcast_buffers=False))
rows = lite.strategy.ranks.all_gather(net.net[1].running_mean)
out["buffers differ"] = not torch.equal(rows[0], rows[1])

# -- compressed
out["close"] = {
    "fp16": distance(DDPStrategy(ddp_comm_hook=default.fp16_compress_hook)),
    "powerSGD": distance(
        DDPStrategy(
            ddp_comm_state=powerSGD.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=1,
                start_powerSGD_iter=4,
            ),
            ddp_comm_hook=powerSGD.powerSGD_hook,
        )
    ),
    "wrapped": distance(
        DDPStrategy(
            ddp_comm_state=powerSGD.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=1,
                start_powerSGD_iter=4,
            ),
            ddp_comm_hook=powerSGD.powerSGD_hook,
            ddp_comm_wrapper=default.fp16_compress_wrapper,
        )
    ),
}


# -- a state of one model, and one for each
def state():
    return powerSGD.PowerSGDState(process_group=None, start_powerSGD_iter=2)


shared = DDPStrategy(ddp_comm_state=state(), ddp_comm_hook=powerSGD.powerSGD_hook)
first, made = fit(shared, max_epochs=1)
made.fit(first, DataLoader(data, batch_size=4))
attempt("another model", lambda: made.fit(Net(), DataLoader(data, batch_size=4)))
each = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD.powerSGD_hook)
_, made = fit(each, max_epochs=1)
attempt("a state for each", lambda: made.fit(Net(), DataLoader(data, batch_size=4)))


# -- post-local SGD: each rank alone, and together every 4 steps from the 4th on
def post_local():
    return DDPStrategy(
        ddp_comm_state=lambda: post_localSGD.PostLocalSGDState(
            process_group=None,
            subgroup=new_subgroups(group_size=1)[0],
            start_localSGD_iter=4,
        ),
        ddp_comm_hook=post_localSGD.post_localSGD_hook,
        model_averaging_period=4,
    )


def spread(net):
    rows = lite.strategy.ranks.all_gather(weights(net))
    return float((rows[0] - rows[1]).abs().max())


spreads = []
Net.momentum = 0.0  # the momentum of rank 0 alone would be saved
for steps in (4, 5, 6, 9, 10, 13):
    net, made = fit(post_local(), max_epochs=-1, max_steps=steps)
    spreads.append(spread(net))
    if steps == 9:  # they have just been averaged
        made.save_checkpoint("averaged.ckpt")
    whole = net
out["spreads"] = spreads
resumed, _ = fit(post_local(), max_epochs=-1, max_steps=13, ckpt_path="averaged.ckpt")
out["resumed"] = float((weights(resumed) - weights(whole)).abs().max())
attempt(
    "a state without period",
    lambda: fit(
        DDPStrategy(
            ddp_comm_state=lambda: post_localSGD.PostLocalSGDState(None, None, 2),
            ddp_comm_hook=post_localSGD.post_localSGD_hook,
        )
    ),
)

Net.momentum = 0.9

# -- parameters that are not used
never = lambda batch_idx: False
attempt("unused", lambda: fit("ddp", never))
attempt("unused, found", lambda: fit("ddp_find_unused_parameters_true", never))
attempt("unused, static", lambda: fit(DDPStrategy(static_graph=True), never))
attempt(
    "static graph that changes",
    lambda: fit(DDPStrategy(static_graph=True), lambda batch_idx: batch_idx < 2),
)


class Loop(Lite):
    def run(self):
        net = Net()
        model, optimizer = self.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            self.backward(model.training_step(data[:4], 9))
            optimizer.step()


attempt("lite", lambda: Loop(accelerator="cpu", strategy="ddp", devices=2).run())


class Unused(Loop):
    def setup(self, module, *optimizers):
        module.uses_spare = never
        return super().setup(module, *optimizers)


attempt("lite, unused", lambda: Unused(accelerator="cpu", strategy="ddp", devices=2).run())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


class Twice(Loop):
    def run(self):
        net = Checkpointed()
        model, optimizer = self.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        self.backward(model(inputs).sum())


attempt("lite, twice", lambda: Twice(accelerator="cpu", strategy="ddp", devices=2).run())
Path(f"out{made.global_rank}.json").write_text(json.dumps(out))
