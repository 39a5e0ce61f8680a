"""Stages of models in turn, in one process, beside the whole model."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import load_script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import (
    MicroBatch,
    Recompute,
    TrainStep,
    apply_activation_checkpointing,
)
from stratagem_mesh.pipeline.cuts import find_stages
from stratagem_mesh.pipeline.staged_model import StagedModel, StageEnd

SCRIPTS = Path(__file__).parents[1] / "scripts"

in_turn = load_script(SCRIPTS / "pipeline_in_turn.py")
models = load_script(SCRIPTS / "pipeline_models.py")

CUTS: dict[str, list[list[str]]] = {
    "residual": [["blocks.1"], ["blocks.0", "blocks.2", "head"]],
    "unet": [["middle"], ["down.1", "up.0", "up.2"]],
    "graphs": [["layers.2"], ["layers.0", "layers.1", "head"]],
    "encoder": [["encoder.layers.2"], ["encoder.layers.0", "encoder.layers.1", "head"]],
    "recurrent": [["second"], ["first", "second", "head"]],
    "towers": [["image"], ["text.1", "image"]],
    "parts": [["parts.body"], ["parts.body.0", "parts.body.2", "out"]],
}
OUTPUTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "unet": lambda model, batch: model(batch),
    "graphs": lambda model, batch: model(batch),
    "towers": lambda model, batch: model(*batch),
}


def outputs_of(name: str) -> Callable[[nn.Module, Any], Any] | None:
    return None if name == "parts" else OUTPUTS.get(name, lambda model, batch: model(batch[0]))


@pytest.mark.parametrize(
    ("name", "cuts", "virtual"),
    [
        (name, cuts, virtual)
        for name, lists in CUTS.items()
        for cuts in lists
        for virtual in ((1, 2) if len(cuts) == 3 else (1,))
    ],
)
def test_losses_gradients_and_outputs_equal_the_whole_model(
    name: str, cuts: list[str], virtual: int
) -> None:
    model, step, batch = models.made(name)
    outputs = outputs_of(name)
    in_turn.compare(model, step, batch, len(cuts) + 1, cuts, virtual=virtual, outputs=outputs)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(("count", "virtual"), [(2, 1), (3, 1), (4, 2)])
def test_cuts_by_the_sizes_of_parameters(name: str, count: int, virtual: int) -> None:
    model, step, batch = models.made(name)
    in_turn.compare(model, step, batch, count, virtual=virtual, outputs=outputs_of(name))


# -- what crosses


def values_of(model: nn.Module, step: Any, batch: Any, cuts: list[str]) -> list[Any]:
    positions = in_turn.Positions(model, len(cuts) + 1, cuts)
    program = positions.programs(step, batch)[0]
    return [(value.key, value.stage, value.readers) for value in program.values]


def test_a_sum_of_blocks_in_the_model_crosses_as_one_tensor() -> None:
    model, step, batch = models.made("residual")
    found = values_of(model, step, batch, ["blocks.2", "blocks.3"])
    assert found == [
        (("argument", "blocks.2", 0, 0), 0, (1,)),
        (("argument", "blocks.3", 0, 0), 1, (2,)),
    ]


def test_a_skip_connection_goes_from_its_owner_to_each_reader() -> None:
    model, step, batch = models.made("unet")
    found = values_of(model, step, batch, ["middle", "up.2"])
    assert (("output", "down.0", 0, 0), 0, (2,)) in found
    assert (("output", "down.1", 0, 0), 0, (1,)) in found
    assert all(stage < reader for _, stage, readers in found for reader in readers)


def test_a_block_that_runs_twice_sends_a_value_for_each_call() -> None:
    model, step, batch = models.made("towers")
    found = values_of(model, step, batch, ["text.1", "image"])
    assert [key for key, stage, _ in found if stage == 0] == [
        ("output", "text.0", 0, 0),
        ("output", "text.0", 1, 0),
    ]


# -- costs


class Uneven(nn.Module):
    """Registers its head first; its blocks cost 1, 1, 1 and 5."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Repeat(times) for times in (1, 1, 1, 5))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x - self.mean)
        output: Tensor = self.head(x)
        return output


class Repeat(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(8, 8), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def test_stages_balance_operations_of_a_run_on_the_example() -> None:
    stages = find_stages(Uneven(), 2, example=torch.zeros(16, 8))
    assert stages.cuts == ("blocks.3",)
    assert list(stages.units) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert stages.costs == pytest.approx((3 / 8, 5 / 8), abs=0.05)
    assert find_stages(Uneven(), 2).cuts == ("blocks.2",)


def test_modules_run_in_the_order_of_the_example() -> None:
    torch.manual_seed(0)
    model = Uneven().double()
    batch = torch.randn(4, 8).double()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().sum()
        return loss

    in_turn.compare(model, step, batch, 3, ["blocks.1", "head"], example=batch)
    with pytest.raises(ConfigurationError, match="expected cuts in the order in which modules run"):
        in_turn.compare(model, step, batch, 2, ["blocks.1"])


def test_finding_stages_changes_nothing() -> None:
    torch.manual_seed(0)
    model = models.Residual()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    find_stages(model, 3, example=torch.randn(2, 3, 6, 6, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert type(model.blocks[0]) is nn.Sequential


def test_modules_of_one_stage_are_one_unit() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
            self.two = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    assert find_stages(Two(), 2).units == {"one": 0, **{f"two.{index}": 1 for index in range(4)}}
    assert find_stages(Two(), 2, ["two"]).units == {"one": 0, "two": 1}
    assert find_stages(Two(), 2, ["one.2"]).units == {
        **{"one.0": 0, "one.1": 0, "one.2": 1, "one.3": 1, "two": 1}
    }


def test_parts_of_a_module_are_stages_where_the_model_has_too_few_modules() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(ones)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Inner()

    ones = torch.ones(())
    stages = find_stages(Outer(), 2)
    assert stages.units == {"net.one": 0, "net.two": 1}
    assert stages.parameters["net.scale"] == (0, 1)


# -- parameters


def test_other_stages_are_freed_and_their_places_keep_shapes_and_types() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    whole = [p.untyped_storage().data_ptr() for p in model.parameters()]
    vars(model[2].bias)["decays"] = False
    staged = StagedModel(model, find_stages(model, 3))
    staged.drop_absent([1])
    gc.collect()
    assert vars(model[2].bias)["decays"] is False
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert set(model.state_dict()) == {f"1.{key}" for key in nn.BatchNorm1d(4).state_dict()}
    assert model[0].weight.shape == (4, 8)
    assert model[2].weight.dtype == torch.bfloat16
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.untyped_storage().nbytes() == 4
    assert whole[0] not in [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert staged.placeholders == {
        id(getattr(model[i], key)) for i in (0, 2) for key in ("weight", "bias")
    }
    assert list(staged.units) == ["1"]


def test_each_stage_holds_tied_weights_and_parameters_of_the_model_itself() -> None:
    model = models.Encoder()
    stages = find_stages(model, 3, ["encoder.layers.0", "head"])
    assert stages.parameters["embed.weight"] == stages.parameters["head.weight"] == (0, 2)
    assert stages.parameters["positions"] == (0, 1, 2)
    assert stages.tied == (
        (("positions",), (0, 1, 2)),
        (("embed.weight", "head.weight"), (0, 2)),
    )
    assert StagedModel(model, stages).shared == {"positions": (0, 1, 2)}


def test_a_weight_that_user_code_reads_in_the_example_is_held_by_all_stages() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.body(self.embed(tokens)), self.embed.weight)

    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (2, 5))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    model = Tied().double()
    in_turn.compare(model, step, tokens, 2, ["body.2"], example=tokens)
    with pytest.raises(
        ConfigurationError, match=r"reads the parameter 'embed\.weight', which stage 1"
    ):
        in_turn.compare(model, step, tokens, 2, ["body.2"])


# -- features inside of units


@pytest.mark.parametrize("keep", [None, "matmul"])
def test_activation_checkpointing_of_units(keep: Any) -> None:
    def prepare(model: nn.Module, units: dict[str, nn.Module] | None) -> None:
        chosen = nn.TransformerEncoderLayer
        apply_activation_checkpointing(model, Recompute(chosen, keep=keep))

    model, step, batch = models.made("encoder")
    in_turn.compare(model, step, batch, 3, outputs=outputs_of("encoder"), prepare=prepare)


class Checkpointed(nn.Module):
    """Repeats its blocks by checkpoint in its own forward; their inputs are sums."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Repeat(2) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = 0.5 * x + checkpoint(block, x + 1, use_reentrant=self.reentrant)
        return x


def _square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def test_a_cut_inside_of_a_call_that_user_code_repeats_is_refused() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(3)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return made

    model, batch = Repeated(), torch.randn(2, 4)
    staged = StagedModel(model, find_stages(model, 2, ["layers.1"]))
    program = staged.program(partial(_square, model, batch), batch, trains=True)
    staged.drop_absent([1])
    received = {value: torch.zeros(value.shape) for value in program.reads(1)}
    loss, _, _ = staged.forward(program, 1, received, partial(_square, model, batch))
    message = (
        "a module around 'layers.0' of stage 0 is computed again in backward on a stage that has "
        "not all of it: expected cuts between modules with activation checkpointing"
    )
    with pytest.raises(ConfigurationError, match=message):
        loss.backward()


def test_activation_checkpointing_around_units() -> None:
    torch.manual_seed(0)
    model = Checkpointed().double()
    in_turn.compare(model, _square, torch.randn(3, 4).double(), 3, ["blocks.1", "blocks.2"])


# Of dynamo, which asks any input for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_units() -> None:
    def prepare(model: nn.Module, units: dict[str, nn.Module] | None) -> None:
        torch._dynamo.reset()
        for name, block in model.named_modules():
            if name in ("layers.0", "layers.2", "layers.3"):
                block.compile(backend=count)

    runs = []

    def count(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return run

    model, step, batch = models.made("graphs")
    in_turn.compare(model, step, batch, 2, prepare=prepare)
    assert len(runs) == 3 + 3  # of the whole model, and of the stages


def test_autocast_decides_the_types_of_values() -> None:
    model, step, batch = models.made("encoder")

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = step(model, batch)
        return loss

    positions = in_turn.compare(model.float(), half, batch, 2, ["encoder.layers.2"])
    whole = positions.programs(step, batch)[0].values
    narrow = positions.programs(half, batch)[0].values
    assert [value.dtype for value in whole] == [torch.float32]
    assert [value.dtype for value in narrow] == [torch.float32]

    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def product(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(batch).square().mean()
        return loss

    positions = in_turn.compare(layers, product, torch.randn(2, 4), 2)
    found = positions.programs(product, torch.randn(2, 4))[0].values
    assert [value.dtype for value in found] == [torch.bfloat16]


def test_units_of_other_stages_do_not_begin() -> None:
    called: list[str] = []

    def prepare(model: nn.Module, units: dict[str, nn.Module] | None) -> None:
        for name, unit in (units or {}).items():
            unit.register_forward_pre_hook(lambda *_, name=name: called.append(name))

    model, step, batch = models.made("encoder")
    positions = in_turn.Positions(model, 4, virtual=2, prepare=prepare)
    positions.programs(step, batch)
    called.clear()
    positions.train(step, batch)
    assert sorted(called) == sorted(positions.stages.units)


def test_forward_hooks_of_user_code_see_the_outputs_of_all_stages() -> None:
    """As those of models of transformers that return hidden states."""

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(3)
            self.found: list[Tensor] = []

        def collect(self) -> None:
            for layer in self.layers:
                layer.register_forward_hook(lambda *given: self.found.append(given[-1]))

        def forward(self, x: Tensor) -> Tensor:
            self.found.clear()
            total: Tensor = self.layers(x) + torch.stack(self.found).sum(0)
            return total

    torch.manual_seed(0)
    model = Collects().double()
    batch = torch.randn(2, 4).double()
    model.collect()
    kept = model.found
    stages = find_stages(model, 2, ["layers.2"])
    staged = StagedModel(model, stages)
    program = staged.program(partial(_square, model, batch), batch, trains=True)
    assert [value.key for value in program.values] == [
        ("output", "layers.0", 0, 0),
        ("output", "layers.1", 0, 0),
    ]
    _, sent, _ = staged.forward(program, 0, {}, partial(_square, model, batch))
    loss, _, _ = staged.forward(program, 1, sent, partial(_square, model, batch))
    assert len(kept) == 3
    assert torch.equal(loss, _square(model, batch))


def test_a_unit_follows_a_change_of_the_type_of_the_model() -> None:
    model, step, batch = models.made("encoder")
    staged = StagedModel(model, find_stages(model, 2))
    first = staged.program(partial(step, model, batch), batch, trains=True)
    model.float()
    other = (batch[0].clone(), batch[1].clone(), None)[:2]
    staged._programs.clear()
    second = staged.program(partial(step, model, other), other, trains=True)
    assert [value.dtype for value in first.values] == [torch.float64]
    assert [value.dtype for value in second.values] == [torch.float32]


# -- user code around units


class Careful(nn.Module):
    """Catches exceptions, changes its batch and its lists, and logs values at the end."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.seen: list[Any] = []
        self.logged: dict[str, Any] = {}
        self.register_buffer("count", torch.zeros(()))

    def step(self, batch: Tensor) -> Tensor:
        self.count += 1
        noise = torch.rand(())
        batch.mul_(2).div_(2)
        try:
            x = self.layers(batch)
        except Exception:
            x = self.layers(batch)
        self.seen.append(x.detach())
        loss: Tensor = x.square().mean() * (1 + noise)
        self.logged["loss"] = loss.item()
        self.logged["largest"] = float(x.detach().numpy().max())
        if loss.item() > 1e9:
            raise ValueError
        return loss


def test_a_dry_run_leaves_no_trace_and_accepts_values_that_are_read_at_the_end() -> None:
    torch.manual_seed(0)
    model = Careful().double()
    batch = torch.randn(2, 4).double()
    before, rng = batch.clone(), torch.get_rng_state()
    positions = in_turn.Positions(model, 2)
    for staged, part in zip(positions.staged, positions.models, strict=True):
        staged.program(lambda part=part: part.step(batch), batch, trains=True)
        assert part.seen == []
        assert part.logged == {}
        assert int(part.count) == 0
        assert all(module.training for module in part.modules())
    assert torch.equal(batch, before)
    assert torch.equal(torch.get_rng_state(), rng)
    positions = in_turn.compare(model, lambda part, batch: part.step(batch), batch, 2)
    assert [list(part.logged) for part in positions.models] == [[], ["loss", "largest"]]


def test_evaluation_gives_each_rank_the_outputs_that_user_code_decides_by() -> None:
    model, _, (tokens, _) = models.made("encoder")
    model.eval()

    def decode(model: nn.Module) -> list[int]:
        found = tokens[:1, :2]
        while found.shape[1] < 6 and int(found[0, -1]) != 7:
            found = torch.cat([found, model(found)[:, -1:].argmax(-1)], 1)
        return [int(token) for token in found[0]]

    with torch.no_grad():
        expected = decode(copy.deepcopy(model))
    positions = in_turn.Positions(model, 4, virtual=2)
    assert positions.evaluate(decode) == [expected, expected]


def test_evaluation_of_parts_that_user_code_calls() -> None:
    model, _, (inputs, _) = models.made("parts")
    model.eval()

    def predict(model: Any) -> Any:
        x = model.parts["in"](inputs)
        for layer in model.parts["body"]:
            x = torch.relu(layer(x) + model.bias)
        return x.argmax(1).tolist()

    with torch.no_grad():
        expected = predict(copy.deepcopy(model))
    positions = in_turn.Positions(model, 3)
    assert positions.evaluate(predict) == [expected] * 3


def test_copies_of_a_model_in_stages_are_plain() -> None:
    model, _, _ = models.made("encoder")
    positions = in_turn.Positions(model, 2, ["encoder.layers.2"])
    first = copy.deepcopy(positions.models[0])
    layer = first.encoder.layers[0]
    assert type(layer) is nn.TransformerEncoderLayer
    with torch.no_grad():
        layer.norm1.weight.zero_()
    x = torch.randn(1, 3, 8).double()
    assert not torch.equal(layer(x), positions.models[0].encoder.layers[0](x))
    assert isinstance(positions.models[0].encoder.layers[0], nn.TransformerEncoderLayer)


def test_a_staged_model_is_freed_with_its_last_reference() -> None:
    from weakref import ref

    model = models.Encoder()
    staged = StagedModel(model, find_stages(model, 2))
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not staged.placeholders


def test_the_end_of_a_stage_is_no_exception_that_user_code_catches() -> None:
    assert not issubclass(StageEnd, Exception)


# -- refusals


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LazyLinear(4), nn.Linear(4, 4)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        vars(self.two)["lock"] = threading.Lock()


def repeated_blocks() -> nn.Sequential:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    apply_activation_checkpointing(model, True)
    return model


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (
            lambda: find_stages(linears(2), 3),
            r"3 stages, but Sequential has 2 module\(s\) with parameters to divide between them "
            r"\('0', '1'\): expected at least as many as pipeline x virtual_stages",
        ),
        (
            lambda: find_stages(linears(4), 3, ["1"]),
            r"pipeline_cuts=\['1'\]: expected 2 different name\(s\), those of the first modules",
        ),
        (
            lambda: find_stages(linears(4), 2, ["*"]),
            r"pipeline_cuts has '\*', which Sequential does not have: expected names of modules, "
            "such as '0', '1'",
        ),
        (
            lambda: find_stages(
                nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 2, ["1"]
            ),
            "pipeline_cuts has '1', a ReLU without parameters: expected the first module with",
        ),
        (
            lambda: find_stages(nn.Sequential(nn.Linear(4, 4), linears(3)), 3, ["1", "1.1"]),
            "pipeline_cuts has '1' and '1.1' inside of it: a stage begins with a whole module",
        ),
        (
            lambda: find_stages(repeated_blocks(), 2, ["1.1"]),
            "pipeline_cuts has '1.1' inside of '1', whose activations are computed again in "
            "backward, as a whole: expected a cut between such modules, or activation_checkpoint",
        ),
        (
            lambda: find_stages(repeated_blocks(), 4),
            r"4 stages, but Sequential has 2 module\(s\) with parameters to divide between them",
        ),
        (
            lambda: find_stages(linears(4), 2, ["0"]),
            r"pipeline_cuts=\['0'\] leaves a stage without a module with parameters: they run in "
            "the order 0, 1, 2, 3; expected cuts at different ones, and none at the first",
        ),
        (
            lambda: find_stages(nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 4)), 2, ["1"]),
            "pipeline_cuts has '1', which Sequential also has under another name, by which it "
            "belongs to an earlier stage: expected a module that has one name",
        ),
        (
            lambda: find_stages(linears(4), 2, example=torch.zeros(3, 5)),
            "Sequential was run on example_input without values, to find the order and the costs "
            "of its modules, and raised RuntimeError",
        ),
        (
            lambda: StagedModel(model := Lazy(), find_stages(model, 2, ["two"])),
            "the parameter 'one.weight' has no shape yet, and stages are found by shapes: call",
        ),
        (
            lambda: StagedModel(model := Locked(), find_stages(model, 2, ["two"])),
            "the module 'two' cannot be copied, which a run without values needs: TypeError",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_divisions_that_cannot_be_made_are_refused(find: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find()


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class Early(Loop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.abs().max() > 1:
            x = x / 2
        output: Tensor = self.layers[1](x)
        return output


class Random(Loop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        output: Tensor = self.layers[1](x) + F.dropout(x, 0.5)
        return output


class Mixed(nn.Module):
    """The mask of the first layer is drawn by user code, and two later stages read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        mask = F.dropout(x, 0.5)
        y = self.layers[1](x) * mask
        output: Tensor = self.layers[2](y) * mask
        return output


class Penalty(Loop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return x + penalty


class Keeps(nn.Module):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), kept

    def __deepcopy__(self, memo: Any) -> Any:
        made = Keeps(self.kept)
        made.layer = copy.deepcopy(self.layer, memo)
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.kept.append(x.tanh())
        return x


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.layers = nn.Sequential(Keeps(self.kept), nn.Linear(4, 4))

    def __deepcopy__(self, memo: Any) -> Any:
        return Hidden().double()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        x = self.layers(x)
        return x + self.kept[0]


class Sparse(nn.Module):
    """The shapes in it depend on values; the result does not, nor do those that it keeps."""

    def __init__(self, kept: list[Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), kept

    def __deepcopy__(self, memo: Any) -> Any:
        made = Sparse(self.kept)
        made.layer = copy.deepcopy(self.layer, memo)
        return made

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        output = torch.zeros_like(made)
        for row in (made.sum(1) > 0).nonzero()[:, 0].tolist():
            output[row] = made[row]
        if self.kept is not None:
            self.kept.append(output.mean(1))
        return output


class HiddenSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.layers = nn.Sequential(Sparse(self.kept), nn.Linear(4, 4))

    def __deepcopy__(self, memo: Any) -> Any:
        return HiddenSparse().double()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        x = self.layers(x)
        return x + self.kept[0][:, None]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.Sequential(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Linear(4, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 2
        output: Tensor = self.layers(x) + x
        return output


class Handle:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), Handle()


class ReturnsHandles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Opaque(), Opaque()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "cuts", "error", "message"),
    [
        (
            Loop,
            ["layers.1"],
            ConfigurationError,
            "the module 'layers.0' of stage 0 reads a result of 'layers.1' of stage 1: expected "
            "cuts in the order in which modules run, and none inside of a loop",
        ),
        (
            Early,
            ["layers.1"],
            UserCodeError,
            r"test_stages.py:\d+ reads a value of stage 0 by aten\.\S+, and the stages of a "
            r"pipeline cannot follow what user code decides by it: expected control flow .*"
            r"\. Not run before: 'layers\.1'",
        ),
        (
            Mixed,
            ["layers.1", "layers.2"],
            ConfigurationError,
            r"test_stages.py:\d+ draws random numbers by aten\.\S+ for a tensor of stage 0, which "
            "the stages 1, 2 all compute, with other numbers",
        ),
        (
            Penalty,
            ["layers.1"],
            ConfigurationError,
            r"user code reads the parameter 'layers.0.\w+', which stage 1 does not have, but "
            "stage 0: expected that a parameter is read by its own module: call the module",
        ),
        (
            Hidden,
            ["layers.1"],
            ConfigurationError,
            "user code reads a tensor of the module 'layers.0' of stage 0 that the module does not "
            "return, and stage 1 cannot receive it",
        ),
        (
            HiddenSparse,
            ["layers.1"],
            ConfigurationError,
            "user code reads a tensor of the module 'layers.0' of stage 0 that the module does not",
        ),
        (
            InPlace,
            ["layers.1"],
            ConfigurationError,
            "the module 'layers.0' of stage 0 changes an argument in place, and stage 1 reads the "
            "argument afterwards: expected an operation that returns a new tensor",
        ),
        (
            partial(Checkpointed, reentrant=True),
            ["blocks.1"],
            ConfigurationError,
            r"the module 'blocks.0' is called by checkpoint\(..., use_reentrant=True\) at "
            r"\S*test_stages.py:\d+, which gives a pipeline no gradients",
        ),
        (
            ReturnsHandles,
            ["layers.1"],
            ConfigurationError,
            "the module 'layers.0' returns a Handle, which other stages cannot rebuild: "
            "TypeError: no copies. Expected tensors and plain data",
        ),
    ],
)
def test_values_that_stages_cannot_exchange_are_refused(
    model: Callable[[], nn.Module], cuts: list[str], error: type[Exception], message: str
) -> None:
    torch.manual_seed(0)
    whole = model().double()
    positions = in_turn.Positions(whole, len(cuts) + 1, cuts)
    for staged, part in zip(positions.staged, positions.models, strict=True):
        batch = torch.randn(2, 4).double()
        with pytest.raises(error, match=message):
            staged.program(partial(_square, part, batch), batch, trains=True)


def test_units_with_shapes_that_depend_on_values_run_once_on_random_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Sparse(), Sparse(), nn.Linear(4, 4)).double()
    batch = torch.randn(5, 4).double()
    in_turn.compare(model, _square, batch, 3, outputs=lambda model, batch: model(batch))


class Scaled(nn.Module):
    """Reads its values outside of torch, which no run without values can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made * float(abs(made.detach().numpy()).mean())


def test_units_that_refuse_tensors_without_values_run_once_on_random_values() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(4, 4)).double()
    batch = torch.rand(5, 4).double()
    in_turn.compare(model, _square, batch, 2, outputs=lambda model, batch: model(batch))


def test_an_error_of_a_unit_comes_from_its_run_on_random_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4)).double()
    staged = StagedModel(model, find_stages(model, 2))
    x = torch.rand(5, 4).double()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        staged.program(lambda: model(x).sum(), x, trains=True)


def test_random_numbers_of_user_code_for_one_stage_are_fine() -> None:
    model = Random().double()
    found = values_of(model, _square, torch.randn(2, 4).double(), ["layers.1"])
    assert found == [(("output", "layers.0", 0, 0), 0, (1,))]


def test_calls_that_the_dry_run_did_not_make_are_refused() -> None:
    model = linears(2)
    staged = StagedModel(model, find_stages(model, 2))
    batch = torch.zeros(2, 4)
    program = staged.program(partial(_square, model, batch), batch, trains=True)

    def longer() -> Any:
        return model(model(batch))

    value = program.values[0]
    with pytest.raises(UserCodeError, match="'0' was called more often than in the run without"):
        staged.forward(program, 1, {value: torch.zeros(2, 4)}, longer)
    with pytest.raises(
        UserCodeError, match=r"'0' made a tensor of shape \(3, 4\) and torch.float32"
    ):
        staged.forward(program, 0, {}, lambda: model(torch.zeros(3, 4)))


def test_losses_of_equal_shapes_have_programs_of_their_own() -> None:
    """As lite.step(model, batches, loss) with one loss, then another."""
    model = linears(3)
    staged = StagedModel(model, find_stages(model, 2, ["2"]))
    batch = torch.zeros(2, 4)

    def skipping(batch: Tensor) -> Any:
        return model[2](model[0](batch)).sum()

    class Step(TrainStep):
        def __init__(self, loss: Callable[[Tensor], Any]) -> None:
            self._loss = loss

        def loss(self, part: Any, *, converted: bool = False) -> Any:
            return self._loss(part)

    def step(loss: Callable[[Tensor], Any]) -> Any:
        opened = MicroBatch(Step(loss), batch)
        return staged.program(opened.loss, batch, trains=True)

    first, second = step(partial(_square, model)), step(skipping)
    assert [value.key[1] for value in first.values] == ["1"]
    assert [value.key[1] for value in second.values] == ["0"]
    assert step(partial(_square, model)) is first
    assert step(skipping) is second
    with pytest.raises(UserCodeError, match="ended before stage 0 had called '1', whose tensors"):
        staged.forward(first, 0, {}, lambda: model[0](batch))


def test_calls_outside_of_steps_and_evaluations_are_refused() -> None:
    model = linears(2)
    staged = StagedModel(model, find_stages(model, 2))
    staged.drop_absent([0])
    with pytest.raises(
        UserCodeError,
        match="the module '1' of stage 1 was called in training mode, with gradients, outside of a "
        r"training step, on a rank that does not have it: call the model under torch.no_grad",
    ):
        model(torch.zeros(2, 4))
    with (
        staged.evaluating([0], lambda value, tensor: torch.zeros(2, 4)),
        pytest.raises(
            UserCodeError,
            match="'Sequential' was called in training mode, with gradients, outside of a training "
            "step: call it under",
        ),
    ):
        model(torch.zeros(2, 4))


class Cache:
    def get_seq_length(self) -> int:
        return 0


class Cached(Loop):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def test_caches_in_an_evaluation_are_refused() -> None:
    positions = in_turn.Positions(Cached().eval(), 2)
    with pytest.raises(UserCodeError, match="called with a Cache, of which each stage of a pipel"):
        positions.evaluate(lambda model: model(torch.zeros(2, 4), Cache()))


class Logged(nn.Module):
    """A layer whose results are logged alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.logged: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        aside = self.aside(x)
        made: Tensor = self.last(x)
        self.logged.append(aside.mean() + made.sum())
        return made


def test_a_value_without_an_effect_on_the_loss_has_no_gradient() -> None:
    model, batch = Logged().double(), torch.rand(5, 4).double()
    staged = StagedModel(model, find_stages(model, 2, ["last"]))
    program = staged.program(partial(_square, model, batch), batch, trains=True)
    found = {value.key[1]: value.differentiable for value in program.values}
    assert found == {"first": True, "aside": False}
