"""The search for layers that can be divided, without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.context.attention import refuse_weights
from stratagem_mesh.context.call import Call, begin, end
from stratagem_mesh.tensor.layers import STYLES
from stratagem_mesh.tensor.planned import INNER, refuse_wrong
from stratagem_mesh.tensor.region import Region, draws_numbers
from stratagem_mesh.tensor.search import find_layers


class Twice(nn.Module):
    """Reads a layer's output by a layer, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = self.up(x) * scale
        self.seen = self.seen + 1
        return self.down(hidden), hidden


class Heads(nn.Module):
    """A view by a number of heads that is not an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.v(x).view(len(x), 4, 2).relu().view(len(x), 8))  # type: ignore[no-any-return]


class Bias(Heads):
    """A trained bias for each head, which each rank would need a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.v(x).view(len(x), -1, 2) + self.bias).flatten(1))  # type: ignore[no-any-return]


@dataclass
class Features:
    """Features that a model returns."""

    last: Tensor
    inner: dict[str, Any]
    cycle: Features | None = None


class Leaving(nn.Module):
    """Inner features that leave the model in some way, and buffers that count calls."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way
        self.kept: list[Any] = []
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        hidden = self.up(self.norm(x)).relu()
        if self.way == "attribute":
            self.hidden = hidden
        if self.way == "list":
            self.kept.append({"hidden": hidden})
        output = Features(self.down(hidden), {"hidden": hidden if self.way == "dataclass" else 0})
        output.cycle = output
        return output


class Asking(nn.Module):
    """Reads a value, and computes something else by the answer."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.up, self.down, self.question = nn.Linear(8, 16), nn.Linear(16, 8), question
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.question == "reduces" and (x > 0).any():
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        if self.question == "norm" and (x > 0).any():
            hidden = self.norm(hidden.view(len(x), -1, 4)).flatten(1)
        if self.question == "features" and hidden[0, 0] > 0:
            return x
        if self.question == "raises" and (x > 0).any():
            raise ValueError
        if self.question == "scales":
            hidden = hidden * (1 if (x > 0).any() else 2)
        return self.down(hidden)  # type: ignore[no-any-return]


def pair(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 8))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(), "the model returns it"),
        (Heads(), "shape '[2, 4, 2]' is invalid for input of size 8"),
        (Bias(), "an operand has all the features"),
        (pair(nn.LayerNorm(16)), "an operation reduces divided features"),
        (pair(nn.Softmax(-1)), "an operation reduces divided features"),
        (pair(nn.PReLU(16)), "_prelu_kernel reads it"),
        (pair(nn.Unflatten(1, (-1, 8)), nn.Flatten(1, 2), nn.Dropout(0.5)), ""),
    ],
)
def test_layers_that_other_operations_read_stay_whole(model: nn.Module, reason: str) -> None:
    found = find_layers(model, 2, torch.zeros(2, 8))
    first = next(name for name, part in model.named_modules() if isinstance(part, nn.Linear))
    assert found.whole.get(first, "") == reason
    assert bool(found.styles) == (not reason)


def test_heads_that_do_not_divide_stay_whole() -> None:
    model = pair(nn.Unflatten(1, (-1, 8)), nn.Flatten(1, 2))
    assert find_layers(model, 2, torch.zeros(2, 8)).styles == {"0": "colwise", "3": "rowwise"}
    assert find_layers(model, 4, torch.zeros(2, 8)).styles == {}


def test_a_search_leaves_the_model_as_it_was() -> None:
    model = Twice()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    find_layers(model, 2, {"x": torch.zeros(2, 8), "scale": 2.0})
    assert model.seen.tolist() == [0.0]
    assert not model.up._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("dataclass", "the model returns it"),
        ("attribute", "the model keeps it in an attribute"),
        ("list", "the model keeps it in an attribute"),
        ("", None),
    ],
)
def test_features_that_leave_the_model_stay_whole(way: str, reason: str | None) -> None:
    model = Leaving(way)
    assert find_layers(model, 2, torch.zeros(2, 8)).whole.get("up") == reason
    assert model.calls.item() == 0
    assert model.norm.num_batches_tracked == 0
    assert not hasattr(model, "hidden")
    assert model.kept == []


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("reduces", "an operation reduces divided features"),
        ("norm", "its use depends on values that the model reads"),
        ("features", "one of the divided features is taken"),
        ("raises", None),
        ("scales", None),
    ],
)
def test_layers_are_divided_if_both_answers_to_a_condition_allow_it(
    question: str, reason: str | None
) -> None:
    found = find_layers(Asking(question), 2, torch.zeros(2, 8))
    assert found.whole.get("up") == reason
    assert bool(found.styles) == (reason is None)


@pytest.mark.parametrize(
    ("compute", "part"),
    [
        (parametrizations.weight_norm, "weight"),
        (parametrizations.spectral_norm, "weight"),
        (lambda layer: parametrizations.weight_norm(layer, "bias", 0), "bias"),
        (nn.utils.weight_norm, "weight"),
        (nn.utils.spectral_norm, "weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_layers_with_computed_weights_stay_whole(compute: Any, part: str) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    compute(model[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reason = f"its {part} is computed from other parameters"
    assert find_layers(model, 2, torch.zeros(2, 8)).whole["1"] == reason
    assert not draws_numbers(model)
    style = STYLES["colwise"](Region(cast(Any, None), draws=False))
    message = (
        rf"up\.{part} is computed from other parameters, such as by weight_norm or spectral_norm, "
        "and ranks divide parameters: expected a tensor_plan without this layer, or torch.nn"
    )
    with pytest.raises(ConfigurationError, match=message):
        style.check("up", model[1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_operation_on_parts_of_logits_is_explained() -> None:
    strategy = MeshStrategy(tensor=2)
    error = RuntimeError("aten.nll_loss_forward.default got mixed torch.Tensor and DTensor")
    strategy.tensor_layers = {"up": "colwise"}
    assert str(strategy.explain(cast(Any, None), error)).startswith("a sharded parameter")
    strategy.tensor_layers = {"up": "colwise", "head": "colwise_vocabulary"}
    message = str(strategy.explain(cast(Any, None), error))
    assert message.startswith(
        "a DTensor was used where a whole tensor is needed. In training the outputs of 'head' are "
        "parts of logits (colwise_vocabulary): compute their loss by stratagem_mesh.cross_entropy("
        "logits, target), or gather them by logits.full_tensor(). Otherwise a sharded parameter"
    )
    assert strategy.explain(cast(Any, None), RuntimeError("another")) is None


def test_frozen_parameters_between_divided_layers_are_divided_as_trained_ones() -> None:
    model = pair(nn.Unflatten(1, (-1, 4)), nn.LayerNorm(4), nn.Flatten(1, 2))
    model[2].requires_grad_(False)  # type: ignore[index]
    found = find_layers(model, 2, torch.zeros(2, 8))
    assert found.styles["2"] == "replicated_with_grad_allreduce"
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]


def test_the_example_of_the_model_is_taken() -> None:
    model: Any = pair()
    model.example_input_array = torch.zeros(2, 8)
    assert find_layers(model, 2, None).styles == {"0": "colwise", "1": "rowwise"}


def test_the_example_takes_the_dtype_of_the_model() -> None:
    model = pair(nn.GELU()).to(torch.bfloat16)
    found = find_layers(model, 2, torch.zeros(2, 8))
    assert found.styles == {"0": "colwise", "2": "rowwise"}


class Gated(nn.Module):
    """A gate and features in one layer, and a norm or a scale of them."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 32), nn.Linear(16, 8), kind
        self.norm, self.gate = nn.LayerNorm(4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(x).chunk(2, -1)
        hidden = left * right.sigmoid()
        if self.kind == "reduced":
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        if self.kind == "measured":
            with torch.no_grad():
                self.size = float(hidden.norm())
        if self.kind == "normed":
            hidden = self.norm(hidden.unflatten(-1, (-1, 4))).flatten(-2)
        if self.kind == "scaled":
            hidden = hidden * self.gate(x)
        return self.down(hidden)  # type: ignore[no-any-return]


PACKED = {"up": "colwise_packed_2", "down": "rowwise"}


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (
            "",
            PACKED | {"up": "colwise"},
            "'up' by 'colwise', .* are cut: .* 'colwise_packed_2' for two",
        ),
        ("reduced", PACKED, "'up' by 'colwise_packed_2', .* an operation reduces .* Expected a "),
        ("scaled", PACKED, "'up' by 'colwise_packed_2', .* whole features that are trained meet"),
        ("normed", PACKED, f"'up', and each rank uses the parameters of 'norm' .* '{INNER}' in"),
        ("normed", PACKED | {"norm": INNER}, None),
        ("measured", PACKED, None),
        ("", PACKED, None),
        ("", {"up": "colwise_gather_output", "down": "rowwise"}, None),
    ],
)
def test_a_plan_that_computes_something_else_is_refused(
    kind: str, plan: dict[str, str], message: str | None
) -> None:
    example = torch.zeros(2, 8)
    model: nn.Module = Gated(kind)
    if message is None:
        refuse_wrong(model, 2, example, plan, in_blocks=False)
        return
    with pytest.raises(ConfigurationError, match=f"tensor_plan divides {message}"):
        refuse_wrong(model, 2, example, plan, in_blocks=False)
    refuse_wrong(model, 2, None, plan, in_blocks=False)
    refuse_wrong(model, 2, torch.zeros(2, 7), plan, in_blocks=False)


def test_a_plan_may_let_frozen_features_meet_divided_ones() -> None:
    """The same plan is refused where these features are trained."""
    model = Gated("scaled")
    example = torch.zeros(2, 8)
    with pytest.raises(ConfigurationError, match="whole features that are trained meet it"):
        refuse_wrong(model, 2, example, PACKED, in_blocks=False)
    model.gate.requires_grad_(False)
    refuse_wrong(model, 2, example, PACKED, in_blocks=False)
    assert not any(parameter.requires_grad for parameter in model.gate.parameters())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (["up"], r"tensor_plan=\['up'\]: expected a mapping of names to styles"),
        ({"up": "columns"}, "tensor_plan\\['up'\\]='columns': expected one of 'colwise', "),
    ],
)
def test_a_plan_of_another_kind_is_refused(plan: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MeshStrategy(tensor=2, tensor_plan=plan)


def test_weights_of_attention_are_refused_where_ranks_divide_a_sequence() -> None:
    group: Any = None
    begin(Call("'body' (Encoder)", group, 4))
    try:
        with pytest.raises(UserCodeError, match="for its weights, and ranks divide its"):
            refuse_weights(True)
        refuse_weights(False)
    finally:
        end()
    refuse_weights(True)
