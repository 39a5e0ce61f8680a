"""Precisions: contexts, conversions, and what a precision says of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.accelerators import Accelerator
from stratagem.discovery import AcceleratorSpec, PrecisionSpec, get_registry
from stratagem.errors import ConfigurationError
from stratagem.precision import Precision
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.training import WIDTH, build
from stratagem_testing.surroundings import Surroundings

KIND = "precision"


def bound(bench: Bench) -> Precision:
    """Return a precision that has taken the accelerator."""
    precision: Precision = bench.make()
    precision.bind(_accelerator(bench))
    return precision


def _accelerator(bench: Bench) -> Accelerator:
    spec = get_registry().find("accelerator", bench.option("accelerator")).spec
    accelerator: Accelerator = spec.build()
    return accelerator


def _device(bench: Bench) -> torch.device:
    """Return the device on which products are computed."""
    return _accelerator(bench).device(0)


def _settings() -> dict[str, Any]:
    """Return what contexts of a precision change."""
    kind = "cpu"
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled(kind),
        "the dtype of autocast": torch.get_autocast_dtype(kind),
        "the cache of autocast": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }


def _changed(before: dict[str, Any]) -> str:
    now = _settings()
    return "; ".join(f"{k} was {v}, and is {now[k]}" for k, v in before.items() if now[k] != v)


@check(KIND, "itself/name and dtype")
def _itself(bench: Bench) -> None:
    """It is a Precision with a name and a dtype, which agree with its spec."""
    precision = bench.make()
    assert isinstance(precision, Precision), (
        f"{bench.component.name} made {precision!r}: subclass stratagem.precision.Precision"
    )
    assert isinstance(getattr(precision, "name", None), str), "it has no name"
    assert isinstance(precision.dtype, torch.dtype), (
        f"its dtype is {precision.dtype!r}; expected a torch.dtype: what large matrix products "
        "are computed in"
    )
    spec = bench.component.spec
    if spec is None:
        return
    assert isinstance(spec, PrecisionSpec), f"its spec is {type(spec).__name__}"
    assert precision.name == spec.name, (
        f"the spec {spec.name!r} makes a precision with the name {precision.name!r}: preset it by "
        "init_args"
    )
    assert precision.shardable == spec.shardable, (
        f"the spec says shardable={spec.shardable}, and the class shardable={precision.shardable}: "
        "a plan is made by the first"
    )


@check(KIND, "itself/accelerators")
def _accelerators(bench: Bench) -> None:
    """An accelerator that the spec does not list raises an error. The tested one does not.

    Nor does one that cannot autocast, if products are in `dtype` all the same.
    """
    without: Any = _accelerator(bench)
    without.autocast = lambda dtype: None
    precision = bench.make()
    right = [precision.dtype] * 2  # another check covers autocast
    if (
        bench.error(lambda: precision.bind(without), ConfigurationError) is None
        and bench.error(lambda: _products_of(bench, bound(bench))) is None
        and _products_of(bench, bound(bench)) == right
    ):
        error = bench.error(lambda: _products_of(bench, precision))
        assert error is None and _products_of(bench, precision) == right, (  # noqa: PT018
            "bind() took an accelerator whose autocast(dtype) is None, and a linear layer does not "
            f"compute in {precision.dtype} then ({brief(error)}): raise a ConfigurationError in "
            "bind(), or users compute in another dtype without a word"
        )
    spec = bench.component.spec
    if not isinstance(spec, PrecisionSpec) or spec.accelerators is None:
        error = bench.error(lambda: bound(bench))
        assert error is None, (
            f"bind(accelerator) of {bench.option('accelerator')!r} ended in {brief(error)}"
        )
        return
    left_out = [
        candidate.spec
        for candidate in get_registry().candidates("accelerator")
        if candidate.spec.name not in spec.accelerators
    ]
    for other in left_out:
        assert isinstance(other, AcceleratorSpec)
        if other.name != "cpu":
            continue  # others are refused for the lack of a device
        error = bench.error(lambda: bench.lite(precision=spec.name))
        assert type(error).__name__ == "ConfigurationError", (
            f"accelerators={spec.accelerators} in the spec, and precision={spec.name!r} on the CPU "
            f"was not refused: {brief(error)}"
        )
        assert spec.name in str(error), f"the refusal does not name {spec.name!r}: {error}"


@check(KIND, "itself/sharding")
def _sharding(bench: Bench) -> None:
    """With shardable=False, a strategy with sharded state raises an error with the reason."""
    precision = bench.make()
    if precision.shardable:
        return  # strategies with sharded state are tried by their own kit
    error = bench.error(lambda: bench.lite(strategy="fsdp", devices=2, plugins=[precision]))
    assert type(error).__name__ == "ConfigurationError", (
        f"shardable=False, and strategy='fsdp' was not refused: {brief(error)}"
    )
    assert precision.name in str(error), f"the refusal does not name the precision: {error}"


@check(KIND, "contexts/restored")
def _restored(bench: Bench) -> None:
    """init_context and forward_context restore autocast, default dtype and gradient mode."""
    precision = bound(bench)
    for name, make in (
        ("init_context", precision.init_context),
        ("forward_context", precision.forward_context),
    ):
        before = _settings()
        context = make()
        if name == "forward_context" and context is None:
            continue
        assert isinstance(context, AbstractContextManager), (
            f"{name}() returned {context!r}; expected a context manager"
        )
        with context:
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert not _changed(before), f"after {name}() {_changed(before)}: restore it on exit"
        with make() or nullcontext(), make() or nullcontext():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert not _changed(before), (
            f"after {name}() within {name}(), as of a model in Lite.autocast(), "
            f"{_changed(before)}: return a new context from each call, which torch.autocast needs"
        )
        error = bench.error(lambda make=make: _fail_in(make()), ZeroDivisionError)  # type: ignore[misc]
        assert error is not None, f"{name}() swallows exceptions"
        assert not _changed(before), (
            f"after an exception in {name}() {_changed(before)}: restore it on every exit"
        )


def _fail_in(context: Any) -> None:
    with context:
        raise ZeroDivisionError


@check(KIND, "life/nothing changed")
def _nothing_changed(bench: Bench) -> None:
    """It changes no setting of the process but within its contexts."""
    before, settings = Surroundings.now(), _settings()
    precision = bound(bench)
    with precision.init_context():
        model = build(lambda: nn.Linear(WIDTH, WIDTH))
    precision.convert_module(model)
    for make in (precision.input_converter, precision.output_converter):
        if (convert := make()) is not None:
            convert(torch.ones(2))
    changed = before.changes() + list(filter(None, [_changed(settings)]))
    assert not changed, (
        f"making it, bind and convert_module changed {'; '.join(changed)}: a later run of the "
        "program has it, too. Set it in forward_context, which restores it"
    )


@check(KIND, "contexts/entered again")
def _again(bench: Bench) -> None:
    """One forward_context serves every step."""
    precision = bound(bench)
    context = precision.forward_context()
    if context is None:
        return
    values = torch.ones(4, 4, dtype=precision.dtype)
    before = _settings()
    seen = []
    for _ in range(3):
        with context:
            seen.append((values @ values).dtype)
    assert len(set(seen)) == 1, f"forward_context works once only: products are {seen}"
    assert not _changed(before), f"after three steps {_changed(before)}"


class _Mixed(nn.Module):
    """A module with tied weights, a frozen layer, and buffers of floats, integers and complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.frozen = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.weight.is_scale = True  # type: ignore[attr-defined]
        self.norm.eval()
        self.register_buffer("position", torch.arange(WIDTH))
        self.register_buffer("slopes", torch.ones(WIDTH), persistent=False)
        # As rotary embeddings have it.
        self.register_buffer("angles", torch.polar(torch.ones(WIDTH), torch.arange(1.0, WIDTH + 1)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.second(self.frozen(self.first(x))))
        return output


@check(KIND, "conversions/module")
def _module(bench: Bench) -> None:
    """convert_module converts in place.

    It keeps names, integers, ties, frozen parameters, attributes of parameters, the mode of each
    layer, and values up to rounding.
    """
    precision = bound(bench)
    original, module = build(_Mixed), build(_Mixed)
    weight = module.get_parameter("norm.weight")
    converted = precision.convert_module(module)
    assert isinstance(converted, nn.Module), (
        f"convert_module returned {converted!r}; expected the module"
    )
    assert converted is module, (
        "convert_module returned another module, such as a copy: the user's own would never be "
        "trained. Convert the parameters in place and return the module"
    )
    before, after = original.state_dict(), converted.state_dict()
    missing = sorted(before.keys() - after.keys())
    assert not missing, (
        f"convert_module lost or renamed {', '.join(missing)}: a checkpoint of another precision "
        "would not load"
    )
    for name in ("position", "norm.num_batches_tracked"):
        assert after[name].dtype is before[name].dtype, (
            f"convert_module made the integers {name!r} {after[name].dtype}: convert "
            "floating-point tensors only"
        )
        assert torch.equal(after[name], before[name]), f"convert_module changed {name!r}"
    assert after["angles"].is_complex(), (
        f"convert_module made the complex buffer 'angles' {after['angles'].dtype}, without its "
        "imaginary parts: convert what is_floating_point() says, which complex tensors are not"
    )
    named: Any = converted
    assert named.first.weight is named.second.weight, (
        "convert_module untied a weight that two layers share"
    )
    assert not any(p.requires_grad for p in named.frozen.parameters()), (
        "convert_module lets a frozen layer be trained"
    )
    trained = [name for name, p in converted.named_parameters() if p.requires_grad]
    assert all(converted.get_parameter(name).is_floating_point() for name in trained), (
        "convert_module left a parameter to train that is no floating-point tensor"
    )
    assert trained, "convert_module froze everything, such as the batch norm's weight"
    assert named.norm.weight is weight and weight.is_scale, (  # noqa: PT018
        "convert_module made a new parameter of a batch norm's weight: what refers to the old one, "
        "such as an optimizer, and its attributes and hooks are lost. Convert in place "
        "(module.to(dtype))"
    )
    assert named.training and not named.norm.training, (  # noqa: PT018
        "convert_module changed the mode of a layer: train() and eval() are the user's affair"
    )
    floats = (named.slopes.dtype, named.norm.running_mean.dtype)
    assert floats[0] is floats[1], (
        f"convert_module made buffers {floats[1]}, and left one {floats[0]} that is not saved "
        "(persistent=False): module.buffers() has it, and state_dict() does not"
    )
    with bound(bench).init_context():
        begun: Any = bound(bench).convert_module(nn.LayerNorm(2))
    assert begun.weight.dtype is named.norm.weight.dtype, (
        f"a model that is built in init_context() has weights of {begun.weight.dtype}, and one "
        f"that is converted afterwards of {named.norm.weight.dtype}: init_context gives new "
        "tensors the dtype of the parameters"
    )
    with bound(bench).init_context():
        made = torch.empty(1).dtype
    own = {p.dtype for p in converted.parameters() if p.is_floating_point()}
    assert made in own, (
        f"in init_context() a new tensor has {made}, and convert_module makes parameters of "
        f"{', '.join(sorted(map(str, own)))}: a large model would be made in {made} first. Return "
        "stratagem.precision.default_dtype(dtype) from init_context"
    )
    rounding = _rounding(named.norm.weight.dtype)
    for name in ("norm.weight", "norm.running_var", "frozen.weight", "angles"):
        off = (after[name].to(torch.complex128) - before[name]).abs().max()
        assert off <= rounding * before[name].abs().max(), (
            f"convert_module changed the values of {name!r} by {float(off):.2g}"
        )


def _rounding(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


@check(KIND, "conversions/batches")
def _batches(bench: Bench) -> None:
    """Converters convert only floating-point tensors, in any nesting, and return new tensors."""
    precision = bound(bench)
    for name, make in (
        ("input_converter", precision.input_converter),
        ("output_converter", precision.output_converter),
    ):
        convert = make()
        if convert is None:
            continue
        dtype = precision.dtype if name == "output_converter" else torch.float32
        _judge_converter(name, convert, dtype)
    convert = precision.output_converter() or (lambda output: output)
    output = convert(torch.ones(2, dtype=precision.dtype))
    assert output.dtype is torch.get_default_dtype(), (
        f"output_converter() makes {output.dtype} of {precision.dtype} (None: it changes nothing); "
        f"expected the default dtype, {torch.get_default_dtype()}, in which a user computes a loss"
    )


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def _judge_converter(name: str, convert: Callable[[Any], Any], dtype: torch.dtype) -> None:
    floats = torch.linspace(0, 1, 6).to(dtype)
    expected = convert(floats).dtype
    batch: dict[str, Any] = {
        "floats": floats,
        "integers": torch.arange(5),
        "flags": torch.tensor([True]),
        "pixels": torch.arange(5, dtype=torch.uint8),
        "numbers": torch.arange(5, dtype=torch.int32),
        "waves": torch.ones(2, dtype=torch.complex64),
        "empty": [],
        "nested": [(torch.linspace(0, 2, 6).to(dtype), "text", None, 7)],
    }
    nested = batch["nested"][0]
    converted = convert(batch)
    same = batch["nested"][0] is nested and nested[0].dtype is dtype
    assert batch["floats"] is floats and floats.dtype is dtype and same, (  # noqa: PT018
        f"{name}() changes the batch in place: the loader's own tensors are converted"
    )
    assert isinstance(converted, dict) and converted.keys() == batch.keys(), (  # noqa: PT018
        f"{name}() returned {converted!r} for a dict of tensors"
    )
    for key in ("integers", "flags", "pixels", "numbers", "waves"):
        assert converted[key].dtype is batch[key].dtype, (
            f"{name}() made {key} {converted[key].dtype}: labels and masks stay what they are"
        )
    for other in (torch.float64, torch.float32, torch.bfloat16):
        found = convert(torch.ones(2, dtype=other)).dtype
        assert found is expected, (
            f"{name}() makes {expected} of {dtype}, and {found} of {other}: a batch may have any "
            "floating-point tensor, as NumPy's are float64"
        )
    ((inner, text, nothing, number),) = converted["nested"]
    assert (text, nothing, number) == ("text", None, 7), f"{name}() changed what is no tensor"
    for where, found in (("a dict", converted["floats"]), ("a tuple in a list in a dict", inner)):
        assert found.dtype is expected, (
            f"{name}() makes {expected} of a tensor of {dtype}, and {found.dtype} of one in "
            f"{where}: batches are dicts, too. stratagem.data.map_tensors converts any nesting"
        )
    try:
        pair = convert(_Pair(floats, torch.arange(2)))
    except TypeError as error:
        raise AssertionError(
            f"{name}() of a named tuple, which datasets yield too, ended in TypeError: {error}; "
            "such a one is made of its parts as arguments"
        ) from None
    assert isinstance(pair, _Pair), f"{name}() made a {type(pair).__name__} of a named tuple"
    assert pair.first.dtype is expected, f"{name}() left a tensor in a named tuple as it was"
    off = float((converted["floats"].double() - floats.double()).abs().max())
    assert off <= _rounding(converted["floats"].dtype), f"{name}() changed values by {off:.2g}"


class _AddsNew(nn.Module):
    """Adds a tensor that it makes, as masks and positions are made."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(WIDTH, device=x.device)


def _products_of(bench: Bench, precision: Precision) -> list[torch.dtype]:
    """Return the dtypes of two layers' outputs, with a tensor between them that the model makes."""
    seen: list[torch.dtype] = []
    with precision.init_context():
        layers = [build(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        model: nn.Module = nn.Sequential(layers[0], _AddsNew(), layers[1])
    model = precision.convert_module(model)
    for index in ("0", "2"):
        model.get_submodule(index).register_forward_hook(
            lambda layer, inputs, output: seen.append(output.dtype)
        )
    convert = precision.input_converter() or (lambda batch: batch)
    device = _device(bench)
    with precision.forward_context() or nullcontext():
        error = bench.error(lambda: model.to(device)(convert(torch.ones(2, WIDTH, device=device))))
    assert error is None or not seen, (
        f"after x + torch.ones({WIDTH}) a linear layer of {seen[0]} ended in {brief(error)}: in "
        "forward_context, tensors that a model makes need the dtype of its parameters "
        "(stratagem.precision.default_dtype), or autocast"
    )
    if error is not None:
        raise error
    return seen


@check(KIND, "conversions/dtype of products")
def _products(bench: Bench) -> None:
    """Under forward_context, a layer of a converted model computes in `dtype`.

    So does a layer after a tensor that the model makes, such as a mask.
    """
    precision = bound(bench)
    seen = _products_of(bench, precision)
    assert seen == [precision.dtype] * 2, (
        f"dtype is {precision.dtype}, and linear layers return {seen}: say in `dtype` what "
        "products are computed in, or let forward_context and convert_module do it. New tensors "
        "have the dtype of the parameters in forward_context (stratagem.precision.default_dtype)"
    )


@check(KIND, "evaluation/inference mode")
def _inference(bench: Bench) -> None:
    """A converted model works under torch.inference_mode, unless inference_mode=False."""
    precision = bound(bench)
    if not precision.inference_mode:
        return
    device = _device(bench)
    model = precision.convert_module(build(_Mixed)).eval().to(device)
    convert = precision.input_converter() or (lambda batch: batch)

    def evaluate() -> None:
        with torch.inference_mode(), precision.forward_context() or nullcontext():
            model(convert(torch.ones(2, WIDTH, device=device))).sum().item()

    error = bench.error(evaluate)
    assert error is None, (
        "inference_mode=True, and a forward pass under torch.inference_mode ended in "
        f"{brief(error)}"
    )
