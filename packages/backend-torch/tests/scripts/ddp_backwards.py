# Run by test_ddp_backwards.py.
import json
import sys
import warnings

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.errors import StratagemError
from stratagem.strategies import DDPShardedStrategy, DDPStrategy

RANKS = int(sys.argv[1])
lite = Lite(accelerator="cpu", strategy="ddp" if RANKS > 1 else "auto", devices=RANKS)
lite.launch()
torch.manual_seed(0)
INPUTS = torch.randn(48, 8)
TARGETS = INPUTS.sum(1, keepdim=True)


def part(index):
    """This rank's part of a batch of 8."""
    own = 8 // RANKS
    first = index * 8 + lite.global_rank * own
    return INPUTS[first : first + own], TARGETS[first : first + own]


class Base(Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.b(self.a(x))

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.a.parameters(), lr=0.2),
            torch.optim.AdamW(self.b.parameters(), lr=0.02),
        )

    def training_step(self, batch, index):
        one, two = self.optimizers()
        one.zero_grad()
        two.zero_grad()
        self.learn(*part(index))
        one.step()
        two.step()

    def learn(self, x, y):
        raise NotImplementedError


class Accumulates(Base):
    def training_step(self, batch, index):
        x, y = part(index)
        self.manual_backward(mse_loss(self(x), y) / 2)
        if index % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class StepsBetween(Base):
    def training_step(self, batch, index):
        x, y = part(index)
        one, two = self.optimizers()
        for optimizer in (one, two):
            one.zero_grad()
            two.zero_grad()
            self.manual_backward(mse_loss(self(x), y))
            optimizer.step()


class TwoForwards(Base):
    def learn(self, x, y):
        first, second = self(x), self(2 * x)
        self.manual_backward(mse_loss(first, y))
        self.manual_backward(0.5 * mse_loss(second, y))


class OneForward(Base):
    def learn(self, x, y):
        out = self(x)
        self.manual_backward(mse_loss(out, y), retain_graph=True)
        self.manual_backward(0.5 * out.square().mean())


class Bare(Base):
    def learn(self, x, y):
        out = self(x)
        mse_loss(out, y).backward(retain_graph=True)
        (0.5 * out.square().mean()).backward()


class Penalty(Base):
    def learn(self, x, y):
        x = x.clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        self.manual_backward(mse_loss(out, y) + slope.square().mean())


class Toggled(Base):
    def backward_of(self, loss):
        self.manual_backward(loss)

    def training_step(self, batch, index):
        x, y = part(index)
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.backward_of(mse_loss(self(x), sign * y))
                optimizer.step()


class ToggledBare(Toggled):
    def backward_of(self, loss):
        loss.backward()


class Unfrozen(OneForward):
    """Its first layer is frozen when the model is wrapped."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)

    def on_train_batch_start(self, batch, index):
        self.a.requires_grad_(index > 1)


class UnfrozenBare(Unfrozen):
    learn = Bare.learn


class OwnBackward(Base):
    """Automatic optimization, with two backward passes in a hook."""

    automatic_optimization = True

    def training_step(self, batch, index):
        x, y = part(index)
        out = self(x)
        self.second = 0.5 * out.square().mean()
        return mse_loss(out, y)

    def backward(self, loss, *args, **kwargs):
        loss.backward(retain_graph=True)
        self.second.backward()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Checkpointed(Base):
    """A reentrant checkpoint runs a backward of its own within that of the loss."""

    def learn(self, x, y):
        x = x.clone().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=True)
        out = torch.utils.checkpoint.checkpoint(self.b, hidden, use_reentrant=True)
        mse_loss(out, y).backward()


class Half(Base):
    def learn(self, x, y):
        self.manual_backward(self.a(x).square().mean())


def total(module):
    return float(sum(p.detach().double().abs().sum() for p in module.parameters()))


def fit(kind, strategy):
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy if RANKS > 1 else "auto",
        devices=RANKS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = kind()
    trainer.fit(model, DataLoader(torch.zeros(6 * RANKS), 1))
    return total(model)


def attempt(function):
    try:
        return function()
    except StratagemError as error:
        return str(error)


KINDS = (Accumulates, StepsBetween, TwoForwards, OneForward, Bare, Penalty, Toggled, ToggledBare)
KINDS += (Unfrozen, UnfrozenBare, OwnBackward, Checkpointed)
STRATEGIES = {
    "ddp": (lambda: "ddp", KINDS),
    "ddp_sharded": (lambda: "ddp_sharded", (StepsBetween, OneForward, Bare, Toggled)),
    "find unused": (
        lambda: DDPStrategy(find_unused_parameters=True),
        (TwoForwards, OneForward, Bare, Toggled, ToggledBare, OwnBackward),
    ),
    "views": (
        lambda: DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=0.0002),
        (Accumulates, OneForward, Bare, Toggled, ToggledBare),
    ),
    "hook": (
        lambda: DDPStrategy(ddp_comm_hook=default_hooks.allreduce_hook),
        (StepsBetween, OneForward, Bare, Toggled),
    ),
    "sharded views": (
        lambda: DDPShardedStrategy(parameters_as_bucket_view=True),
        (OneForward, ToggledBare),
    ),
}


# -- Lite


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x):
        self.kept = self.trunk(x)
        return [head(self.kept) for head in self.heads]


def by_lite(backwards, strategy):
    own = lite if strategy is None else Lite(accelerator="cpu", strategy=strategy, devices=RANKS)
    if RANKS == 1:
        own = lite
    own.launch()
    net = Heads()
    model, optimizer = own.setup(net, torch.optim.SGD(net.parameters(), lr=0.2))
    for index in range(4):
        optimizer.zero_grad()
        backwards(own, model, *part(index))
        optimizer.step()
    return total(net)


def both(out, y):
    return sum(mse_loss(one, y) for one in out)


def one_forward(own, model, x, y):
    out = model(x)
    own.backward(both(out, y), retain_graph=True)
    own.backward(0.5 * sum(one.square().mean() for one in out))


def one_forward_bare(own, model, x, y):
    out = model(x)
    both(out, y).backward(retain_graph=True)
    (0.5 * sum(one.square().mean() for one in out)).backward()


def two_forwards(own, model, x, y):
    first, second = model(x), model(2 * x)
    own.backward(both(first, y))
    both(second, y).backward()


def one_head_each(own, model, x, y):
    one, two = model(x)
    own.backward(mse_loss(one, y), retain_graph=True)
    own.backward(mse_loss(two, -y))


def disjoint(own, model, x, y):
    """Together, the two passes reach each parameter once."""
    one, two = model(x)
    own.backward(mse_loss(two, y), inputs=list(model.heads[1].parameters()), retain_graph=True)
    rest = [*model.trunk.parameters(), *model.heads[0].parameters()]
    own.backward(mse_loss(one, y), inputs=rest)


def penalty(own, model, x, y):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out[0].sum(), x, create_graph=True)
    own.backward(both(out, y) + slope.square().mean())


def held_first(own, model, x, y):
    with own.no_backward_sync(model):
        out = model(x)
        own.backward(both(out, y), retain_graph=True)
    own.backward(0.5 * sum(one.square().mean() for one in out))


def unused(own, model, x, y):
    own.backward(mse_loss(model(x)[0], y))


LITE = {
    "one forward": (one_forward, None),
    "one forward, bare": (one_forward_bare, None),
    "two forwards": (two_forwards, None),
    "held first": (held_first, None),
    "disjoint": (disjoint, None),
    "penalty": (penalty, None),
    "one head each": (one_head_each, "ddp_find_unused_parameters_true"),
    "one forward, sharded": (one_forward, "ddp_sharded"),
    "one forward, bare, find unused": (one_forward_bare, "ddp_find_unused_parameters_true"),
}

warnings.simplefilter("ignore")  # of DDP, that it found no unused parameter
results = {}
for name, (make, kinds) in STRATEGIES.items():
    for kind in kinds:
        results[f"{name}, {kind.__name__}"] = fit(kind, make())
for name, (backwards, strategy) in LITE.items():
    results[f"Lite, {name}"] = by_lite(backwards, strategy)
if RANKS > 1:

    def static():
        return DDPStrategy(static_graph=True)

    results["refused, static"] = attempt(lambda: by_lite(one_forward, static()))
    results["refused, static, bare"] = attempt(lambda: by_lite(one_forward_bare, static()))
    results["refused, static, penalty"] = attempt(lambda: by_lite(penalty, static()))
    results["refused, static, manual"] = attempt(lambda: fit(OneForward, static()))
    results["refused, half"] = attempt(lambda: fit(Half, "ddp"))
    results["refused, unused"] = attempt(lambda: by_lite(unused, None))
rows = lite.ranks.gather_objects(results)
if lite.is_global_zero:
    print(json.dumps(rows))
