"""Models, options and calls that experts on ranks refuse."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem import Module, Trainer
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh import ExpertLoad, MeshStrategy
from stratagem_mesh.expert import parallel
from stratagem_mesh.expert.collectives import ExpertGroup
from stratagem_mesh.expert.dispatch import Dispatch
from stratagem_mesh.expert.modules import find_experts

NAMES = ["layers.*.experts"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 8, 12))
        self.down = nn.Parameter(torch.ones(4, 12, 8))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return x


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


class Written(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(experts)])


class Classic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


class OneInput(Experts):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


class Scaled(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = Experts()


@pytest.mark.parametrize(
    ("model", "names", "size", "message"),
    [
        (
            Written(Experts()),
            NAMES,
            3,
            "'layers.0.experts' has 4 experts, which do not divide between 3 ranks: choose a size "
            "of expert= that divides 4",
        ),
        (
            nn.Linear(2, 2),
            None,
            2,
            "expert=2, but Linear has no experts of transformers: pass expert_modules=['NAME'], "
            "expected a module with parameters of (expert, in, out) and forward(tokens, experts, "
            "weights), in which experts and weights are (tokens, experts of a token); or expert=1",
        ),
        (
            Classic(),
            None,
            2,
            "Classic has no experts of transformers, and 'experts' is a ModuleList of 4 experts, "
            "which a loop of the model calls one by one: pass expert_modules",
        ),
        (
            Classic(),
            ["experts"],
            2,
            "expert_modules has 'experts', a ModuleList of 4 modules, whose tokens are divided "
            "before it is called: expected a module with parameters of (expert, in, out)",
        ),
        (
            Written(Experts()),
            ["layers.*.moe"],
            2,
            "expert_modules has 'layers.*.moe', which names no module of Written: expected names "
            "such as 'layers.0.experts'",
        ),
        (
            Written(OneInput()),
            NAMES,
            2,
            "the experts 'layers.0.experts' (OneInput) have forward(x): expected a module with",
        ),
        (
            Written(Scaled()),
            NAMES,
            2,
            "the experts 'layers.0.experts' (Scaled) have up of (4, 8, 12), down of "
            "(4, 12, 8), scale of (8,), whose first dimensions are not one number of "
            "experts",
        ),
        (
            Written(Wrapped()),
            ["experts.base_layer"],
            2,
            "'layers.0.experts.base_layer' is wrapped by an adapter, which computes its weights "
            "from parameters of their own: expected adapters of other layers than experts",
        ),
    ],
)
def test_a_model_without_divisible_experts_is_refused(
    model: nn.Module, names: Any, size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        find_experts(model, names, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": 0}, "expert=0: expected a number of ranks of at least 1"),
        (
            {"expert": 2, "expert_modules": "experts"},
            "expert_modules='experts': expected a list of names of modules, such as "
            "['layers.*.experts']",
        ),
        (
            {"expert_modules": NAMES},
            "expert_modules=['layers.*.experts'] with expert=1: expected expert= the number of "
            "ranks that divide the experts",
        ),
        (
            {"expert": 2, "tensor": 2, "sequence_parallel": True},
            "expert=2 with sequence_parallel=True: ranks of the tensor axis would send parts of a "
            "sequence to the same experts: expected sequence_parallel=False",
        ),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        MeshStrategy(**options)


def test_experts_that_do_not_divide_the_ranks_are_refused_before_processes_start() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Trainer(accelerator="cpu", devices=4, strategy=MeshStrategy(expert=4, replicate=2))
    assert (
        "expert=4: experts are divided between ranks of shard x context, received shard 2 x "
        "context 1 = 2: expected a size of expert that divides it"
    ) in str(raised.value)


def test_the_load_needs_experts_that_ranks_divide() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(ConfigurationError) as raised:
        ExpertLoad().on_train_start(trainer, Module())
    assert str(raised.value) == (
        "ExpertLoad logs the load of experts that ranks divide, received SingleDeviceStrategy "
        "without expert=: pass MeshStrategy(expert=2), or leave the callback out"
    )


@pytest.fixture
def dispatch() -> Dispatch:
    group: Any = None
    return Dispatch("experts", Experts(), 4, ExpertGroup(group, 2, has_values=False))


def test_a_call_with_weights_in_place_of_experts_is_refused(dispatch: Dispatch) -> None:
    tokens, chosen, weights = torch.ones(3, 8), torch.zeros(3, 2).long(), torch.ones(3, 2)
    with pytest.raises(UserCodeError) as raised:
        dispatch(tokens, weights, chosen)
    assert str(raised.value) == (
        "the experts 'experts' were called with torch.float32 of (3, 8), torch.float32 of (3, 2), "
        "torch.int64 of (3, 2): expert=2 expects tokens of (tokens, features), and the integers "
        "of their experts and the weights of these, both of (tokens, experts of a token), and no "
        "more arguments"
    )
    with pytest.raises(UserCodeError, match="no more arguments"):
        dispatch(tokens[None], chosen, weights)


def test_an_output_that_is_no_row_for_each_token_is_refused(dispatch: Dispatch) -> None:
    dispatch._forward = lambda *given: None
    with pytest.raises(UserCodeError) as raised:
        dispatch._run(torch.ones(3, 8), torch.zeros(3).long(), torch.ones(3))
    assert str(raised.value) == (
        "the experts 'experts' returned NoneType for 3 token(s): expected a tensor of (tokens, "
        "features), each row a sum over the token's experts"
    )


def test_gradients_of_gradients_are_refused() -> None:
    error = RuntimeError("differentiate twice a function marked with @once_differentiable")
    prepared: Any = None
    assert str(MeshStrategy(expert=2).explain(prepared, error)) == (
        "expert=2: a loss has gradients of gradients through experts, and their exchanges between "
        "ranks are differentiable once: leave create_graph=True out, or pass expert=1"
    )


def test_experts_that_the_tensor_axis_divides_are_refused() -> None:
    mesh = Mock()
    with patch("torch.distributed.get_world_size", return_value=2):
        experts = parallel.ExpertParallel(mesh, has_values=False)
    with pytest.raises(ConfigurationError) as raised:
        experts._part("layers.0.experts", "up", Mock(spec=DTensor))
    assert str(raised.value) == (
        "layers.0.experts.up is divided by the tensor axis, and expert=2 divides it by expert: "
        "expected a tensor_plan without experts, or expert=1"
    )
