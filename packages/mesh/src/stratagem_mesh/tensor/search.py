"""Finding the layers to divide in a model that has no plan, by runs without values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.tensor.flow import Flow, Proof, Roles, run_without_values
from stratagem_mesh.tensor.multihead import STYLE, is_attention
from stratagem_mesh.tensor.styles import computed, features, is_linear

_PACKS = 1, 3, 2
"""What is tried for a layer: one layer; queries, keys and values in one; two in one."""

_IS_COUNT = re.compile(r"heads?$|groups?$")
_OF_ONE_HEAD = re.compile(r"head_?(dim|size|width)|(dim|size)_?(per_)?head|d_head")
_LEVELS = 3
"""The levels of numbers to divide: none, those of heads, all but a head's size, all that fit."""


@dataclass
class Found:
    """The result of a search.

    Attributes:
        styles: the style of each module.
        numbers: attributes of modules that a rank divides by the number of ranks, such as a
            number of heads.
        whole: linear layers and attention that stay whole, and why.
    """

    styles: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, list[str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def find_layers(model: nn.Module, ranks: int, example: Any) -> Found:
    """Return the linear layers of a model that can be divided, in pairs.

    Raises:
        ConfigurationError: the model has no example of an input, or the run fails.
    """
    found = Found()
    for name, part, args, kwargs in inputs_of(model, example):
        prefix = f"{name}." if name else ""
        try:
            part_found = _Search(part, ranks, args, kwargs).run()
        except Exception as error:
            is_dummy = hasattr(part, "dummy_inputs") and set(kwargs) >= set(part.dummy_inputs)
            whose = " (its dummy_inputs)" if is_dummy else ""
            raise ConfigurationError(
                f"{type(part).__name__} was run on tensors without values{whose}, to find the "
                f"layers to divide, and raised {type(error).__name__}: {error}\nPass a tensor_plan "
                "of the layers, or another example_input"
            ) from error
        for key in ("styles", "numbers", "whole"):
            own = {prefix + layer: value for layer, value in getattr(part_found, key).items()}
            getattr(found, key).update(own)
    return found


def inputs_of(
    model: Any, example: Any
) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield modules to run, with their names and arguments."""
    given = example if example is not None else getattr(model, "example_input_array", None)
    if given is not None:
        is_keywords = isinstance(given, Mapping)
        args = given if isinstance(given, tuple) else () if is_keywords else (given,)
        yield "", model, args, dict(given) if is_keywords else {}
        return
    inside: tuple[str, ...] = ()
    for name, part in model.named_modules():
        if name.startswith(inside or ("\0",)) or not hasattr(part, "dummy_inputs"):
            continue
        inside = *inside, f"{name}." if name else ""
        yield name, part, (), _dummy_inputs(part)
    if not inside:
        raise ConfigurationError(
            f"{type(model).__name__} has no plan that the mesh can use, and no example of an input "
            "to find layers by: pass MeshStrategy(tensor_plan={'layers.*.up': 'colwise', ...}), or "
            "example_input= (or set example_input_array of the model) to what forward takes"
        )


def _dummy_inputs(part: Any) -> dict[str, Any]:
    """Return the inputs that a model of transformers brings for a run."""
    config = part.config
    inputs = dict(part.dummy_inputs)
    images = getattr(config, "vision_config", config)
    if part.main_input_name == "pixel_values":
        inputs = {}
    if "pixel_values" in signature(part.forward).parameters and hasattr(images, "image_size"):
        size = images.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        inputs["pixel_values"] = torch.zeros(2, images.num_channels, height, width)
    if part.main_input_name == "input_features" and hasattr(config, "max_source_positions"):
        length = 2 * config.max_source_positions
        inputs.pop("input_ids", None)
        inputs["input_features"] = torch.zeros(2, config.num_mel_bins, length)
        inputs["decoder_input_ids"] = torch.zeros(2, 3, dtype=torch.long)
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs


class _Search:
    """Runs a model until all of its roles hold.

    If another operation reads a layer's output, the layer is tried as packed layers, and then
    stays whole.
    Where a run with the shapes of a rank differs, the numbers of its module are divided; in the
    end its layers stay whole.
    """

    def __init__(
        self, model: nn.Module, ranks: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model, self.ranks = model, ranks
        attention = {n: p for n, p in model.named_modules() if is_attention(p)}
        self._attention = set(attention)
        self._args, self._kwargs = alike(model, args, kwargs)
        self._layers = {
            n: p
            for n, p in model.named_modules()
            if is_linear(p) and _is_own(p, model) and n.rpartition(".")[0] not in attention
        }
        self._levels: dict[str, int] = {}
        self._why = {
            name: f"its {keys[0]} is computed from other parameters"
            for name, layer in self._layers.items()
            if (keys := computed(layer))
        }
        for name in self._why:
            del self._layers[name]
        self._tries = dict.fromkeys(self._layers, 0)
        for name, part in attention.items():
            if not all(_is_own(each, model) for each in part.modules()):
                self._keep_whole(name, "another module has a parameter of it")
            if any("parametrizations" in each._modules for each in part.modules()):
                self._keep_whole(name, "a parameter of it is computed from other parameters")

    def run(self) -> Found:
        """Return the layers to divide."""
        while True:
            roles, *others = self._follow()
            groups = _groups(roles)
            numbers = {
                owner: names
                for group in groups
                if (owner := _owner(group)) is not None
                and (names := self._numbers(owner, roles, group))
            }
            proofs = (self._prove(one, numbers) for one in (roles, *others))
            error = next(filter(None, proofs), None)
            if error is None or not groups:
                break
            layers, reason = error
            concerned = [group for group in groups if layers & group] or groups
            keys = {_pattern(_owner(group) or ""): group for group in concerned}
            for group in keys.values():
                self._raise_level(group, reason)
        return self._result(roles, numbers)

    def _follow(self) -> list[Roles]:
        """Run with whole shapes until no layer that is divided has to be whole.

        A model that reads values runs twice, with both answers, and may have two lists of
        operations.
        """
        while True:
            packs = {n: p for n in self._layers if (p := self._packs(n))}
            runs = self._runs(packs)
            refused = {n: why for one in runs for n, why in one.whole.items() if n in packs}
            for name in self._attention & {name for one in runs for name in one.whole}:
                self._keep_whole(name, next(one.whole[name] for one in runs if name in one.whole))
            for name, why in refused.items():
                self._why.setdefault(name, why.partition("\n")[0])
                self._tries[name] += 1
            if refused:
                continue
            changing = _changing(runs)
            for name in changing:
                self._why.setdefault(name, "its use depends on values that the model reads")
                self._tries[name] = len(_PACKS)
            if not changing:
                return runs

    def _runs(self, packs: Mapping[str, int]) -> list[Roles]:
        """Return the roles in a run, and if the model reads values in a run with other answers."""
        flow = Flow(self.model, self.ranks, packs)
        run_without_values(self.model, self._args, self._kwargs, flow)
        found = [flow.roles]
        if flow.has_answered:
            other = Flow(self.model, self.ranks, packs, answer=True)
            with suppress(Exception):  # the answers may fit to no input
                run_without_values(self.model, self._args, self._kwargs, other)
                found.append(other.roles)
        for roles in found:
            used = frozenset().union(*roles.sinks.values())
            roles.sources = [name for name in roles.sources if name in used]
        return found

    def _keep_whole(self, attention: str, reason: str) -> None:
        self._attention.discard(attention)
        self._why[attention] = reason

    def _packs(self, name: str) -> int:
        """Return the number of packed layers to try; 0: the layer stays whole."""
        outputs = features(self._layers[name])[1]
        while (tried := self._tries[name]) < len(_PACKS):
            packs = _PACKS[tried]
            if outputs % (packs * self.ranks) == 0:
                return packs
            self._tries[name] += 1
        return 0

    def _prove(
        self, roles: Roles, numbers: dict[str, list[str]]
    ) -> tuple[frozenset[str], str] | None:
        """Run with the shapes of a rank; return the layers where it differs, and how."""
        proof = Proof(self.model, self.ranks, roles)
        before = {owner: dict(vars(self.model.get_submodule(owner))) for owner in numbers}
        try:
            for owner, names in numbers.items():
                divide_numbers(self.model.get_submodule(owner), names, self.ranks)
            run_without_values(self.model, self._args, self._kwargs, proof)
        except Exception as error:
            reached = roles.operations[: proof.count + 1]
            return (reached[-1].layers if reached else frozenset()), str(error)
        finally:
            for owner, attributes in before.items():
                vars(self.model.get_submodule(owner)).update(attributes)
        return None

    def _raise_level(self, group: frozenset[str], reason: str) -> None:
        """Divide more numbers for a group and similar ones, or let their layers be whole."""
        owner = _owner(group)
        key = _pattern(owner or "")
        level = self._levels.get(key, 0) + 1
        self._levels[key] = level
        if owner is None or level > _LEVELS:
            alike = {_pattern(name) for name in group}
            for name in self._layers:
                if _pattern(name) in alike:
                    self._why.setdefault(name, reason.partition("\n")[0])
                    self._tries[name] = len(_PACKS)

    def _numbers(self, owner: str, roles: Roles, group: frozenset[str]) -> list[str]:
        """Return the attributes of a module to divide, by its level."""
        level = self._levels.get(_pattern(owner), 0)
        sizes = frozenset().union(*(roles.sizes.get(name, set()) for name in group))
        fitting = [
            name
            for name, value in vars(self.model.get_submodule(owner)).items()
            if type(value) is int and value in sizes and value % self.ranks == 0
        ]
        heads = [name for name in fitting if _IS_COUNT.search(name)]
        without_size = [name for name in fitting if not _OF_ONE_HEAD.search(name)]
        return ([], heads, without_size, fitting)[min(level, _LEVELS)]

    def _result(self, roles: Roles, numbers: dict[str, list[str]]) -> Found:
        found = Found(numbers={owner: names for owner, names in numbers.items() if names})
        for name in roles.sources:
            packs = self._packs(name)
            found.styles[name] = "colwise" if packs == 1 else f"colwise_packed_{packs}"
        found.styles |= dict.fromkeys(roles.sinks, "rowwise")
        used = frozenset(roles.sources)
        found.styles |= {
            owner: "replicated_with_grad_allreduce"
            for owner, names in roles.partial.items()
            if names & used
        }
        found.styles |= dict.fromkeys(sorted(self._attention), STYLE)
        attention = {name for name, part in self.model.named_modules() if is_attention(part)}
        linear = {
            name
            for name, part in self.model.named_modules()
            if is_linear(part) and name.rpartition(".")[0] not in attention
        }
        found.whole = {
            name: self._why.get(name, "no layer reads its features alone")
            for name in sorted((linear | attention) - set(found.styles))
        }
        return found


def divide_numbers(part: nn.Module, names: list[str], ranks: int) -> None:
    """Divide attributes of a module that count heads or features, as a rank has a part of them."""
    for name in names:
        setattr(part, name, getattr(part, name) // ranks)


def _changing(runs: list[Roles]) -> set[str]:
    """Return the divided layers whose roles differ between runs."""
    divided: set[str] = set()
    roles = []
    for one in runs:
        used = frozenset(one.sources)
        divided |= used | set(one.sinks)
        inner = {(owner, names & used) for owner, names in one.partial.items() if names & used}
        roles.append({(name, used & {name}) for name in used} | set(one.sinks.items()) | inner)
    differing = {pair for one in roles for other in roles for pair in one ^ other}
    return divided & {layer for name, sources in differing for layer in (name, *sources)}


def _groups(roles: Roles) -> list[frozenset[str]]:
    """Return the layers that are divided together: sources, and the sinks that read them."""
    groups: list[frozenset[str]] = []
    for sink, sources in roles.sinks.items():
        joined = sources | {sink}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return groups


def _owner(group: frozenset[str]) -> str | None:
    """Return the module that holds all layers of a group; None for the model itself."""
    paths = [name.split(".")[:-1] for name in group]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or None


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _is_own(layer: nn.Module, model: nn.Module) -> bool:
    """Whether no other module has a parameter of a layer."""
    own = {id(p) for p in layer._parameters.values() if p is not None}
    others = (part for part in model.modules() if part is not layer)
    return not any(id(p) in own for part in others for p in part._parameters.values())


def alike(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments on the device of a model and in its dtype."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    given = {key: _alike(like, value) for key, value in kwargs.items()}
    return tuple(_alike(like, value) for value in args), given


def _alike(parameter: Tensor, value: Any) -> Any:
    """Return a tensor on the device of a model, and if it holds fractions in the model's dtype."""
    if not isinstance(value, Tensor):
        return value
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype)
