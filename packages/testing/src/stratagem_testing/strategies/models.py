"""The kit's models and data: small, seeded, and each with something that strategies get wrong.

A model takes inputs of shape (n, 6) and returns outputs of shape (n, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from stratagem.module import Module
from stratagem_testing.places import find

FEATURES = 6
GLOBAL_BATCH = 8
"""Samples of a batch over all ranks together."""
_MOST = 64
"""The most samples that there are."""


class Numbered(Dataset[Any]):
    """Samples (number, inputs, target), the same in every process.

    Args:
        samples: how many, at most 64.
    """

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        # Draw all, so that a sample does not depend on their number.
        inputs = torch.randn(_MOST, FEATURES, generator=generator)
        noise = torch.randn(_MOST, 1, generator=generator)
        self.inputs = inputs[:samples]
        self.targets = (inputs.sum(1, keepdim=True).sin() + 0.5 * noise)[:samples]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return index, self.inputs[index], self.targets[index]


def loader(samples: int, parts: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return batches of 8 samples over all parts of the data together."""
    return DataLoader(Numbered(samples), batch_size=GLOBAL_BATCH // parts, shuffle=shuffle)


def dense() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


class _Embedding(nn.Module):
    """Integers in, of which some rows are not used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, 5)
        self.last = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        # As ordering decides, low precision changes nothing.
        chosen = x.float().argsort(1)[:, :2]
        output: Tensor = self.last(self.rows(chosen).flatten(1).to(self.last.weight.dtype))
        return output


class _Tied(nn.Module):
    """One weight under two names, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return output


class _Repeated(nn.Module):
    """One module called three times in a step, and once more in backward (checkpointing)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.layer(x))
        x = torch.tanh(checkpoint(self.layer, x, use_reentrant=False))
        output: Tensor = self.last(x)
        return output


class _Scalar(nn.Module):
    """A parameter without a dimension, and a convolution, whose weight has three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 2, 3)
        self.last = nn.Linear(2 * (FEATURES - 2), 1)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.layer(x[:, None])).flatten(1)) * self.scale
        return output


LARGE = 2**53 + 1
"""An integer that neither float32 nor float64 can hold."""


class Unusual(nn.Module):
    """A model with rare features that a strategy loses easily.

    Random numbers in buffers and frozen parameters, a buffer of float64 and a buffer of large
    integers, which each training step changes, a weight and a buffer that are not contiguous, an
    attribute of a parameter, a layer that stays in evaluation mode, extra state of the module, a
    layer with the name "module", a weight with two names, and entries of parameters and buffers
    that are None.

    Attributes:
        history: the module's own state, which grows by a number in each training step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.first.weight = nn.Parameter(torch.randn(FEATURES, 8).div_(3).t())
        self.norm = nn.BatchNorm1d(8).requires_grad_(False).eval()
        self.module = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.module.weight
        self.last = nn.Linear(8, 1)
        self.last.bias.is_last = True  # type: ignore[attr-defined]
        self.register_buffer("scale", 0.5 + torch.rand(FEATURES))
        self.register_buffer("fraction", 1 / (3 + torch.rand(2, 3, dtype=torch.float64)).t())
        self.register_buffer("count", torch.tensor([LARGE, 2**24 + 1]) + torch.randint(9, (2,)))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.history: list[int] = []
        with torch.no_grad():
            for value in (self.norm.weight, self.norm.bias, self.norm.running_mean):
                assert value is not None
                value.add_(torch.rand(8) / 4)

    def get_extra_state(self) -> Any:
        """Return the history."""
        return {"history": list(self.history)}

    def set_extra_state(self, state: Any) -> None:
        """Take it over."""
        self.history = list(state["history"])

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs; in training, change the buffers and the history."""
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.get_buffer("count").add_(2)
                self.get_buffer("fraction").mul_(1.1)
            self.history.append(len(self.history))
        hidden = self.norm(self.first(x * self.get_buffer("scale")))
        output: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.module(hidden)))))
        return output


class _Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(FEATURES, dtype=torch.complex64))
        self.last = nn.Linear(2 * FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(x * self.phase)
        output: Tensor = self.last(torch.tanh(turned.flatten(1)))
        return output


class _Unused(nn.Module):
    """A layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, 1)
        self.idle = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x)
        return output


class _Large(nn.Module):
    """More than the 25 MB that a bucket of gradients usually has, in a step that costs little."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(1 << 21)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        for number, part in enumerate(self.parts):
            output = output + x[:, number : number + 1] * part.sum()
        return output


class _Routed(nn.Module):
    """Two experts; `route` says for each sample which one it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)])
        self.route = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        output = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            chosen = (self.route == number).nonzero().flatten()
            if len(chosen):
                output = output.index_add(0, chosen, expert(x[chosen]))
        return output


class _TwoDtypes(nn.Module):
    """A vector of float32, and a layer of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.layer = nn.Linear(FEATURES, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer((x * self.scale).double()).float()
        return output


def frozen() -> nn.Module:
    """A first layer, and a bias, that are not trained."""
    net = dense()
    assert isinstance(net, nn.Sequential)
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


def batch_norm() -> nn.Module:
    """Statistics of a batch: buffers of floats and of an integer."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def wide() -> nn.Module:
    """A layer of 160,000 weights: engines keep smaller ones whole on each rank."""
    width = 400
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    )


def dropout() -> nn.Module:
    """Draws random numbers in each step."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))


class _Masked(nn.Module):
    """Sets random elements to zero; draws on the CPU, whatever the device is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) > 0.3).to(x)


def masked() -> nn.Module:
    """Draws random numbers between two layers, on the CPU."""
    return nn.Sequential(nn.Linear(FEATURES, 16), _Masked(), nn.Tanh(), nn.Linear(16, 1))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "embedding": _Embedding,
    "batch_norm": batch_norm,
    "tied": _Tied,
    "frozen": frozen,
    "unused": _Unused,
    "repeated": _Repeated,
    "scalar": _Scalar,
    "dropout": dropout,
    "masked": masked,
    "complex": _Complex,
    "unusual": Unusual,
    "large": _Large,
    "wide": wide,
    "routed": _Routed,
    "two_dtypes": _TwoDtypes,
}
"""What a model's name stands for."""


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a model by its name or place, with the same weights in every process."""
    torch.manual_seed(seed)
    made: nn.Module = (MODELS[name] if name in MODELS else find(name))()
    return made


def _groups(named: Any) -> list[dict[str, Any]]:
    """Return biases and weights as two groups; weights with options of their own.

    By their names, since the shapes of a divided model are another matter.
    """
    every = list(named)
    return [
        {"params": [p for name, p in every if name.endswith("bias")]},
        {
            "params": [p for name, p in every if not name.endswith("bias")],
            "lr": 0.03,
            "weight_decay": 0.02,
        },
    ]


FIRST_STEP = 2**24 + 2
"""The step that `Counting` begins with: odd numbers after it are no numbers of float32."""


class Counting(Optimizer):
    """Momentum, with an additional integer for each parameter, and an additional group option.

    Args:
        groups: parameter groups, each with a "name" and a "scale" of its steps.
    """

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.05, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=FIRST_STEP, momentum_buffer=torch.zeros_like(p))
                state["step"] += 1
                state["momentum_buffer"].mul_(0.9).add_(p.grad)
                p.add_(state["momentum_buffer"], alpha=-group["lr"] * group["scale"])


def _named_groups(named: Any) -> list[dict[str, Any]]:
    """Return the same groups, each with a name and a scale."""
    first, second = _groups(named)
    return [{**first, "name": "biases", "scale": 1.0}, {**second, "name": "others", "scale": 1.0}]


OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "unit": lambda parameters: SGD(parameters, lr=1.0),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=0.02),
    "adamw": lambda parameters: AdamW(parameters, lr=0.02, weight_decay=0.1),
}
"""What an optimizer's name stands for; "unit": a step is the gradient."""
GROUPED: Mapping[str, Callable[[Any], Optimizer]] = {
    "groups": lambda named: SGD(_groups(named), lr=0.08, momentum=0.9),
    "adam_groups": lambda named: Adam(_groups(named), lr=0.02),
    "counting": lambda named: Counting(_named_groups(named)),
}
"""The same of optimizers that take parameters with their names."""


class Learner(Module):
    """Trains a model and notes the events on this rank.

    Args:
        model: its name or place.
        optimizer: its name.
        seed: of the weights.

    Attributes:
        losses: of each micro-batch, of this rank; empty on the first stages of a pipeline.
        seen: numbers of the samples in each training batch.
        evaluated: (numbers of the samples, sum of their losses) of each evaluation batch.
        modes: whether the model was in training mode, for each micro-batch.
        rates: the learning rates of all groups, for each micro-batch.
        begun: the parameters before anything was done to them.
    """

    def __init__(self, model: str = "dense", optimizer: str = "sgd", seed: int = 0) -> None:
        super().__init__()
        self.net = build(model, seed)
        self.begun = flat(dict(self.named_parameters()))
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.evaluated: list[tuple[list[int], float]] = []
        self.modes: list[bool] = []
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        number, inputs, target = batch
        if isinstance(self.net, _Routed):
            self.net.route = number % 2  # of two ranks, each has the samples of one expert
        # Before the forward pass, with which the first stages of a pipeline end.
        self.seen.append(number.tolist())
        self.modes.append(self.net.training)
        optimizers: Any = self.trainer.optimizers
        self.rates.append([group["lr"] for one in optimizers for group in one.param_groups])
        loss = mse_loss(self.net(inputs), target)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss.detach(), on_step=False, on_epoch=True)
        self.log("samples", float(len(number)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", float(number.max()), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error."""
        number, inputs, target = batch
        loss = mse_loss(self.net(inputs), target)
        self.evaluated.append((number.tolist(), float(loss) * len(number)))
        self.log("val_loss", loss, batch_size=len(number))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """As `validation_step`."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the outputs."""
        output: Tensor = self.net(batch[1])
        return output

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters that are trained."""
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if self.optimizer in GROUPED:
            return GROUPED[self.optimizer](named)
        return OPTIMIZERS[self.optimizer]([p for _, p in named])


class Scheduled(Learner):
    """The learning rates of all groups change after each step."""

    def configure_optimizers(self) -> Any:
        """Return the optimizer with a scheduler."""
        optimizer = super().configure_optimizers()
        scheduler = StepLR(optimizer, 1, gamma=0.6)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def plain_gradient(
    samples: list[list[int]], model: str = "dense", seeds: Sequence[int] = ()
) -> list[dict[str, list[float]]]:
    """Return the gradient of the mean loss of each batch by parameter, by torch alone.

    Args:
        samples: numbers of the samples in each batch.
        model: its name.
        seeds: of torch before the forward pass of each batch; (): any.
    """
    data = Numbered(_MOST)
    gradients = []
    for index, numbers in enumerate(samples):
        net = build(model)
        if seeds:
            torch.manual_seed(seeds[index])
        loss = mse_loss(net(data.inputs[numbers]), data.targets[numbers])
        trained = {f"net.{name}": p for name, p in net.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(trained.values()))
        gradients.append(flat(dict(zip(trained, found, strict=True))))
    return gradients


def flat(state: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the tensors of a state as lists of numbers, without those that lie elsewhere.

    Of a large tensor, every some thousandth number.
    """
    return {
        name: numbers(value.detach().flatten()[:: max(1, value.numel() >> 10)])
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel()
    }


def numbers(value: Tensor) -> list[Any]:
    """Return the numbers of a tensor as they are; two for each complex one."""
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    told: list[Any] = value.detach().flatten().cpu().tolist()
    return told


def initial(model: str) -> dict[str, list[float]]:
    """Return the state that a Learner of a model begins with."""
    return {f"net.{name}": value for name, value in flat(build(model).state_dict()).items()}


def trained_names(model: str) -> list[str]:
    """Return the names of the parameters of a Learner of a model that are trained, in order."""
    return [f"net.{name}" for name, p in build(model).named_parameters() if p.requires_grad]
