"""The modules of a model that compute parts of a sequence, one on each rank of the context axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh.context.attention import install
from stratagem_mesh.context.call import Call, begin, end, running, watch_recomputing, watch_repeated
from stratagem_mesh.context.collectives import ContextGroup
from stratagem_mesh.context.comparison import compare
from stratagem_mesh.context.kinds import Arguments, Kind, NamedModule, TorchEncoder, title
from stratagem_mesh.context.transformers_models import (
    TransformersModel,
    check_model,
    is_model,
    region_of,
)
from stratagem_mesh.randomness import OwnStream, generators_of

_DEPTH = re.compile("layer_?drop|drop_?path|stochastic_depth")
NOT_DIVIDED = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
"""Modules that compute over several positions."""


class ContextRegions:
    """Divides sequences in the modules of a model between the ranks of a group.

    Args:
        group: the ranks that share a sequence, in its order.
        check: compare the first forward pass of each module with one over the whole sequence.
        gather_logits: give each rank all logits of a model that computes its loss.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, check: bool = True, gather_logits: bool = False
    ) -> None:
        self._group = ContextGroup(group, dist.get_rank(group), dist.get_world_size(group))
        self._check = check
        self._gather_logits = gather_logits
        self._divided: list[nn.Module] = []
        self._regions: list[Region] = []

    def like(self, *, check: bool) -> ContextRegions:
        """Return regions of another model, of the same ranks."""
        return ContextRegions(self._group.group, check=check, gather_logits=self._gather_logits)

    def divide(self, model: nn.Module, names: Sequence[str] | None) -> None:
        """Let each rank compute a part of the sequence in the modules of these names, in place.

        Raises:
            ConfigurationError: a module is not there, or cannot be divided exactly.
        """
        found = find_regions(model) if names is None else named_regions(model, names)
        if not found:
            raise ConfigurationError(
                f"context={self._group.size}, but {type(model).__name__} has no model of "
                "transformers and no nn.TransformerEncoder, whose sequence the ranks would divide: "
                "pass context_modules=['NAME'] of a module that reads (batch, sequence, ...) and "
                "attends by scaled_dot_product_attention, or context=1"
            )
        for name, module in found.items():
            install(module)
            refuse_layers(name, module)
            region = Region(name, module, self._kind(name, module), self._group, check=self._check)
            region.attach()
            self._regions.append(region)
            self._divided.append(module)

    def end_interrupted(self) -> Call | None:
        """End the regions that a stage of a pipeline has left before their end.

        Returns:
            The forward pass of the region. A backward pass may recompute its layers.
        """
        call = running()
        for region in self._regions:
            region.end()
        return call

    def watch_repeated(self) -> None:
        """Watch the forwards that activation checkpointing repeats, once it is applied."""
        for module in self._divided:
            watch_repeated(module)

    def _kind(self, name: str, module: nn.Module) -> Kind:
        if is_model(module):
            check_model(name, module)
            return TransformersModel(name, module, gather_logits=self._gather_logits)
        if isinstance(module, nn.TransformerEncoder):
            return TorchEncoder(name, module)
        return NamedModule(name, module)


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """Return models of transformers and encoders of torch that lie in no other one, by name."""
    found: dict[str, nn.Module] = {}
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if any(module is part for region in found.values() for part in region.modules()):
            continue
        if is_model(module):
            check_model(name, module)
            body = region_of(module)
            found[names[body]] = body
        elif isinstance(module, nn.TransformerEncoder):
            found[name] = module
    return found


def named_regions(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules of these names; `*` stands for a number.

    Raises:
        ConfigurationError: no module has the name, or two of the modules are nested.
    """
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in names:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = {name: modules[name] for name in modules if expression.fullmatch(name)}
        if not matches:
            raise ConfigurationError(
                f"context_modules has {pattern!r}, which {type(model).__name__} does not have: "
                f"expected names of modules, such as {', '.join(map(repr, list(modules)[1:6]))}"
            )
        found.update(matches)
    for name in found:
        outer = next((n for n in found if n != name and f"{name}.".startswith(f"{n}.")), None)
        if outer is not None:
            raise ConfigurationError(
                f"context_modules has {outer!r} and {name!r} inside of it, whose sequence is "
                "divided already: expected one of them"
            )
    return found


def refuse_layers(name: str, module: nn.Module) -> None:
    """Refuse layers that compute over several positions otherwise than by attention.

    Raises:
        ConfigurationError: names the layer.
    """
    for inner, part in module.named_modules():
        if isinstance(part, NOT_DIVIDED):
            path = ".".join(filter(None, (name, inner)))
            raise ConfigurationError(
                f"context parallelism divides {title(name, module)} along the "
                f"sequence, and {path!r} in it is a {type(part).__name__}, which reads several "
                "positions: name in context_modules the modules without such layers, or pass "
                "context=1"
            )
        option = random_depth(part)
        if option is not None:
            path = ".".join(filter(None, (name, inner))) or type(part).__name__
            raise ConfigurationError(
                f"context parallelism divides {title(name, module)} along the sequence, and {path} "
                f"has {option}: each rank draws numbers of its own there, so that ranks would drop "
                f"other layers or samples. Set {option.partition('=')[0]} to 0, or pass context=1"
            )


def random_depth(part: nn.Module) -> str | None:
    """Return the option by which a module leaves out layers or samples at random."""
    settings = {**vars(getattr(part, "config", None) or object), **vars(part)}
    kind = type(part).__name__
    for name, value in settings.items():
        is_named = _DEPTH.search(name) or "DropPath" in kind or "StochasticDepth" in kind
        if is_named and isinstance(value, float) and value > 0:
            return f"{name}={value}"
    return None


def refuse_kept(name: str, module: nn.Module) -> None:
    """Refuse tensors of the graph that leave a module by an attribute.

    Raises:
        UserCodeError: names the module and its attribute.
    """
    for inner, part in module.named_modules():
        for key, value in vars(part).items():
            if any(isinstance(one, Tensor) and one.grad_fn is not None for one in _items(value)):
                path = ".".join(filter(None, (name, inner))) or type(part).__name__
                raise UserCodeError(
                    f"{path} keeps a tensor with a gradient in its attribute {key!r}, and each "
                    f"rank of the context axis computes a part of {title(name, module)}: a loss of "
                    "it would be of this part. Return it from the module, or pass context=1"
                )


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    return list(value.values()) if isinstance(value, dict) else [value]


class Region:
    """A module that computes parts of a sequence."""

    def __init__(
        self, name: str, module: nn.Module, kind: Kind, group: ContextGroup, *, check: bool
    ) -> None:
        self.name = name
        self.module = module
        self._kind = kind
        self._group = group
        self._is_checked = not check
        self._is_watched = check
        self._call: Call | None = None
        self._stream: OwnStream | None = None
        self._fast_path = False

    def attach(self) -> None:
        """Run the module in parts from now on."""
        self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        watch_recomputing(self.module)
        self.module.register_forward_hook(self._leave, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if running() is not None:
            return None
        cut = self._kind.cut(self._group, args, kwargs)
        if cut is None:
            return None
        if not self._is_checked:
            self._is_checked = True
            compare(self, args, kwargs)
        call, arguments = cut
        self._begin(call, arguments)
        return arguments

    def _begin(self, call: Call, arguments: Arguments) -> None:
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it would not call attention
        if self.module.training:
            device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
            self._stream = OwnStream(self._group.rank, generators_of(device))
        self._call = call
        begin(call)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        call = self.end()
        if call is None:
            return None
        if self._is_watched and output is not None and torch.is_grad_enabled():
            self._is_watched = False
            refuse_kept(self.name, module)
        return None if output is None else self._kind.join(call, output)

    def end(self) -> Call | None:
        """End the forward pass that runs; return it."""
        call, self._call = self._call, None
        if call is None:
            return None
        end()
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        if self._stream is not None:
            self._stream.end()
            self._stream = None
        return call

    def in_parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs, computed in parts."""
        cut = self._kind.cut(self._group, args, kwargs)
        assert cut is not None
        call, (own_args, own_kwargs) = cut
        output = None
        self._begin(call, cut[1])
        try:
            output = self.module.forward(*own_args, **own_kwargs)
        finally:
            output = self._leave(self.module, (), output)
        return output

    def whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs, computed from the whole sequence."""
        return self.module.forward(*args, **kwargs)
