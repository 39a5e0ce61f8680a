"""Adapters of PEFT: which tensors are theirs, and weights with adapters merged."""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stratagem.checkpoint import load_json
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    format_names,
)
from stratagem.launch import rank_zero_warn
from stratagem_extras.pretrained.folder import StoredTensor, read_header
from stratagem_extras.pretrained.names import adapters_of, with_nearest
from stratagem_extras.pretrained.writer import Description

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model.model."
# Entries of a config that leave the computation unchanged, or that names decide.
_FREE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("feedforward_modules", "modules_to_save", "task_type", "init_lora_weights"),
        *("init_weights", "runtime_config", "eva_config", "corda_config", "loftq_config"),
        *("lora_dropout", "module_dropout", "rank_dropout", "vera_dropout", "ensure_weight_tying"),
    }
)
# Which tensors PEFT stores, by the kinds of which a name tells it.
_TENSORS = {
    "LORA": r"lora_[^.]+|trainable_tokens_delta",
    "IA3": r"ia3_[^.]+",
    "VERA": r"vera_lambda_[^.]+|(?<=base_model\.)vera_[AB]",
}
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass
class Adapted:
    """A model with adapters, within a module.

    Attributes:
        prefix: the prefix of its names in the module.
        model: the PeftModel, or a model into which PEFT has injected layers.
        is_wrapped: whether the model is a PeftModel.
    """

    prefix: str
    model: Any
    is_wrapped: bool

    @property
    def base(self) -> str:
        """The prefix of the base model's names in the module."""
        return self.prefix + (_BASE if self.is_wrapped else "")

    @property
    def active(self) -> list[str]:
        """The names of the adapters that take part in a forward pass."""
        if self.is_wrapped:
            return list(self.model.active_adapters)
        layers = [part for part in self.model.modules() if hasattr(part, "adapter_layer_names")]
        return list(layers[0].active_adapters) if layers else []

    def chosen(self, adapter: str) -> str:
        """Return the name of an adapter; "": the active one.

        Raises:
            ConfigurationError: the model lacks the adapter, or several are active.
        """
        names = [adapter] if adapter else self.active
        if len(names) != 1 or names[0] not in self.model.peft_config:
            found = f"received {adapter!r}" if adapter else f"{len(names)} are active"
            raise ConfigurationError(
                f"adapter: expected one of {format_names(self.model.peft_config)}; {found}"
            )
        return names[0]

    def names(
        self,
        described: Mapping[str, Description],
        adapter: str,
        embeddings: bool | str = "auto",
    ) -> dict[str, str]:
        """Return PEFT's name of each tensor of an adapter, by the name in the module.

        Args:
            described: the shape and the dtype of each tensor of the module.
            adapter: the adapter's name.
            embeddings: `save_embedding_layers` of PEFT.

        Raises:
            CheckpointContentError: PEFT stores tensors that it computes from the model's.
        """
        from peft import get_peft_model_state_dict

        config = self.model.peft_config[adapter]
        own = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in described.items()
            if name.startswith(self.prefix)
        }
        found: dict[str, Tensor] = {}
        if not config.is_prompt_learning:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = get_peft_model_state_dict(
                    self.model,
                    {name.removeprefix(self.prefix): value for name, value in own.items()},
                    adapter,
                    save_embedding_layers=embeddings,
                )
        known = {id(value): name for name, value in own.items()}
        if not found or any(id(value) not in known for value in found.values()):
            raise CheckpointContentError(
                f"the adapter {adapter!r} is of the kind {_kind(config)}, of which PEFT stores "
                "other tensors than the model has: train it under single_device or ddp, and save "
                "it with the model's own save_pretrained"
            )
        lacks = "" if self.is_wrapped else _BASE
        return {known[id(value)]: lacks + name for name, value in found.items()}

    def config(self, adapter: str, base: str | os.PathLike[str] | None) -> dict[str, Any]:
        """Return the content of `adapter_config.json`, as PEFT writes it.

        Args:
            adapter: the adapter's name.
            base: the folder of the base model; None: the one that the model names.
        """
        config = copy.copy(self.model.peft_config[adapter])
        config.inference_mode = True
        inner = self.model.get_base_model() if self.is_wrapped else self.model
        if base is not None:
            config.base_model_name_or_path = os.fspath(base)
        elif config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(inner, "name_or_path", None) or None
        entries: dict[str, Any] = config.to_dict()
        if config.task_type is None:
            kind = type(inner) if not isinstance(inner, FSDPModule) else _plain_class(type(inner))
            entries["auto_mapping"] = {
                "base_model_class": kind.__name__,
                "parent_library": kind.__module__,
            }
        return {k: sorted(v) if isinstance(v, set) else v for k, v in entries.items()}


def find_adapted(module: nn.Module, part: str = "") -> Adapted | None:
    """Return the only model with adapters in a module, or None.

    Args:
        module: the user's module.
        part: the submodule to look in; "": the module.

    Raises:
        ConfigurationError: several models have adapters.
    """
    found: list[Adapted] = []
    for path, one in module.named_modules():
        inside = f"{path}.".startswith(f"{part}.") or not part
        if inside and isinstance(getattr(one, "peft_config", None), dict) and adapters_of(one):
            prefix = f"{path}." if path else ""
            if not any(prefix.startswith(outer.prefix) for outer in found):
                found.append(Adapted(prefix, one, hasattr(one, "get_base_model")))
    if len(found) > 1:
        paths = format_names([one.prefix[:-1] for one in found])
        raise ConfigurationError(
            f"{len(found)} models have adapters ({paths}): name one, part={found[0].prefix[:-1]!r}"
        )
    return found[0] if found else None


# -- a folder


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has the weights of an adapter."""
    return (folder / CONFIG).exists()


def open_adapter(
    folder: Path, *, weights: bool = True
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the config and the tensors of an adapter's folder; only the header is read.

    Args:
        folder: the folder.
        weights: whether to look for tensors, too.

    Raises:
        CheckpointError: the folder lacks its weights.
        CheckpointCorruptError: a file has another form.
    """
    try:
        config = load_json((folder / CONFIG).read_bytes())
        if not isinstance(config.get("peft_type"), str):
            raise ValueError("it names no peft_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{str(folder / CONFIG)!r} is no config of PEFT ({error}): copy it again"
        ) from error
    if not weights:
        return config, {}
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{str(folder)!r} has {CONFIG} and no {WEIGHTS}: copy it too, or write it with "
            "save_pretrained of PEFT, whose default it is"
        )
    return config, read_header(folder / WEIGHTS)


def sources_of_adapter(
    folder: Path, module: nn.Module, part: str, described: Mapping[str, Description]
) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter of a model's adapter.

    Args:
        folder: an adapter's folder.
        module: the user's module.
        part: the submodule with adapters; "": find it.
        described: the shape and the dtype of each tensor of the module.

    Raises:
        CheckpointMismatchError: the adapter has another kind, rank or targets.
        ConfigurationError: the model has no adapters, or several are active.
    """
    expected, stored = open_adapter(folder)
    adapted = find_adapted(module, part)
    if adapted is None:
        raise ConfigurationError(
            f"{str(folder)!r} has an adapter, and the model has none: make them first, with "
            "get_peft_model(model, PeftConfig.from_pretrained(folder))"
        )
    adapter = adapted.chosen("")
    names = adapted.names(described, adapter, embeddings=False)
    problems = _differing(expected, json.loads(json.dumps(adapted.config(adapter, None))))
    by_new = {new: own for own, new in names.items()}
    if unknown := stored.keys() - by_new.keys():
        with_embeddings = adapted.names(described, adapter, embeddings=True)
        by_new |= {new: own for own, new in with_embeddings.items() if new in unknown}
    missing = [new for new in names.values() if new not in stored]
    unexpected = [new for new in stored if new not in by_new]
    shapes = {new: tuple(described[own][0]) for new, own in by_new.items()}
    found = {name: tensor.shape for name, tensor in stored.items()}
    if missing:
        problems.append(f"it lacks {with_nearest(missing, shapes, found)}")
    if unexpected:
        problems.append(f"it has {with_nearest(unexpected, found, shapes)}, which the model lacks")
    differing = [
        f"{name} {found[name]} (expected {shape})"
        for name, shape in shapes.items()
        if name in found and found[name] != shape
    ]
    if differing:
        problems.append(f"these have another shape: {format_names(differing, 5)}")
    if problems:
        raise CheckpointMismatchError(
            f"{str(folder)!r} has an adapter of another model: {'; '.join(problems)}. Make the "
            "model's adapters with PeftConfig.from_pretrained(folder), on the base model that the "
            f"adapter was trained on ({expected.get('base_model_name_or_path') or 'not named'})",
            missing,
            unexpected,
        )
    return {own: stored[new] for new, own in by_new.items() if new in stored}


def check_initialization(module: nn.Module, folder: Path, *, has_adapter: bool) -> None:
    """Refuse base weights if an adapter was initialized from other ones, or has changed them.

    Args:
        module: the user's module.
        folder: the folder of the base weights.
        has_adapter: whether the adapter's own weights are read too.

    Raises:
        ConfigurationError: such an adapter, with its name.
    """
    for part in module.modules():
        configs = getattr(part, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            kind = getattr(config, "init_lora_weights", None)
            if isinstance(kind, str) and kind.startswith(_CHANGE_BASE):
                raise ConfigurationError(
                    f"weights={str(folder)!r}: the adapter {name!r} was made with "
                    f"init_lora_weights={kind!r}, which changes the base weights: load them before "
                    "get_peft_model"
                )
            if getattr(config, "use_dora", False) and not has_adapter:
                raise ConfigurationError(
                    f"weights={str(folder)!r}: the adapter {name!r} is DoRA, which has computed "
                    "its magnitudes from the weights that the model had: load the base weights "
                    "before get_peft_model, or pass PretrainedWeights(folder, adapter=...)"
                )


def warn_of_another_base(adapter: Path, folder: Path) -> None:
    """Warn if the config of an adapter names another local folder as its base."""
    named = Path(str(open_adapter(adapter, weights=False)[0].get("base_model_name_or_path") or ""))
    if named.is_absolute() and named.is_dir() and not named.samefile(folder):
        rank_zero_warn(
            f"the adapter in {str(adapter)!r} was trained on {str(named)!r}, and the weights are "
            f"those of {str(folder)!r}: an adapter of another base computes something else"
        )


def _differing(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return which entries of two configs differ that change what an adapter computes."""
    if stored["peft_type"] != own["peft_type"]:
        return [f"its kind is {stored['peft_type']} (expected {own['peft_type']})"]
    return [
        f"its {name} is {stored[name]!r} (expected {own[name]!r})"
        for name in own
        if name in stored and name not in _FREE and (stored[name] or None) != (own[name] or None)
    ]


# -- a checkpoint


def configs_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the configs of a model's adapters by name, as data for a checkpoint; {}: none.

    Example:
        >>> import torch
        >>> configs_of(torch.nn.Linear(2, 1))
        {}
    """
    adapted = find_adapted(module)
    if adapted is None:
        return {}
    return {
        name: json.loads(json.dumps(adapted.config(name, None)))
        for name in adapted.model.peft_config
    }


def names_in_checkpoint(
    tensors: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], source: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return PEFT's name of each tensor of an adapter in a checkpoint, and the adapter's config.

    Args:
        tensors: the weights of a checkpoint by name.
        configs: the configs of adapters by their names; "": the name is unknown.
        source: where the weights lie, for errors.

    Raises:
        CheckpointContentError: it cannot be told which tensors PEFT stores.
    """
    advice = "load the checkpoint with a Trainer, and call save_pretrained(trainer, folder)"
    if not configs:
        raise CheckpointContentError(
            f"{source} has adapters of PEFT, and not their config: pass --like FOLDER with their "
            f"{CONFIG}, which model.peft_config['default'].save_pretrained(FOLDER) writes; or "
            f"{advice}"
        )
    if len(configs) > 1:
        raise CheckpointContentError(
            f"{source} has {len(configs)} adapters ({format_names(configs)}): {advice} with "
            "adapter=NAME"
        )
    ((adapter, config),) = configs.items()
    kind = str(config["peft_type"])
    if kind not in _TENSORS or config.get("bias", "none") != "none":
        biases = f", bias={config['bias']!r}" if kind in _TENSORS else ""
        raise CheckpointContentError(
            f"{source} has an adapter of the kind {kind}{biases}, of which the model has to say "
            f"what PEFT stores; expected one of {', '.join(_TENSORS)}: {advice}"
        )
    own = re.escape(adapter) if adapter else r"[^.]+"
    pattern = re.compile(
        rf".*?(?P<start>base_model\.(?:.*\.)?)"
        rf"(modules_to_save\.{own}\.|(?P<tensor>{_TENSORS[kind]})\.{own}(?P<end>\..+)?)"
    )
    names: dict[str, str] = {}
    for name in tensors:
        if match := re.match(pattern, name):
            tensor, end = match["tensor"] or name[match.end() :], match["end"] or ""
            # The format is older than the module that holds magnitudes.
            end = "" if tensor == "lora_magnitude_vector" else end
            names[name] = match["start"] + tensor + end
    if not names or len(set(names.values())) < len(names):
        found = "several adapters" if names else f"no tensors of a PeftModel of the kind {kind}"
        raise CheckpointContentError(f"{source} has {found}: {advice}, with adapter=NAME")
    return names, dict(config)


# -- merged


@dataclass
class Merge:
    """Tensors that are written together, since adapters change them.

    Attributes:
        sources: the names in the module of the layer's tensors.
        results: the names in the module of the base layer's tensors, by their names in the layer.
        path: the layer's prefix in the module.
        layer: the layer.
    """

    sources: list[str]
    results: dict[str, str]
    path: str
    layer: Any

    def apply(self, adapters: list[str] | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the merged tensors by the names of the base layer's tensors in the module."""
        named = {name.removeprefix(self.path): value for name, value in tensors.items()}
        layer = _rebuilt(self.layer, named, "")
        with torch.no_grad():
            layer.merge(adapter_names=adapters)
        state = layer.get_base_layer().state_dict()
        return {name: state[key] for key, name in self.results.items()}


def merges(
    adapted: Adapted, described: Mapping[str, Description], ties: Mapping[str, str]
) -> tuple[dict[str, str], list[Merge]]:
    """Return the base model's names of tensors, and the layers in which adapters change them.

    Args:
        adapted: the model with adapters.
        described: the shape and the dtype of each tensor of the module.
        ties: the first name of each tensor.

    Returns:
        The name without adapters, within the module, of each tensor that the base model keeps; and
        the layers to merge.

    Raises:
        CheckpointContentError: an adapter cannot be merged.
    """
    for name in adapted.active:
        if adapted.model.peft_config[name].is_prompt_learning:
            kind = _kind(adapted.model.peft_config[name])
            raise CheckpointContentError(
                f"merged=True: the adapter {name!r} is of the kind {kind}, which changes no "
                "weights: leave merged out"
            )
    layers = dict(_layers(adapted))
    kept: dict[str, str] = {}
    found: list[Merge] = []
    inside: dict[str, list[str]] = {path: [] for path in layers}
    for name in described:
        if name.startswith(adapted.base):
            owner = next((path for path in _parents(name) if path in layers), None)
            if owner is None:
                kept[name] = name
            else:
                inside[owner].append(name)
    shared = [first for name, first in ties.items() if first != name]
    for path, names in inside.items():
        layer = layers[path]
        begins = f"{path}{_inner(layer)}"
        of_base = {n.removeprefix(begins): n for n in names if n.startswith(begins)}
        kept |= {own: path + key for key, own in of_base.items()}
        if hasattr(layer, "modules_to_save"):
            continue  # a copy that was trained whole
        inner = getattr(layer, "token_adapter", layer)
        _check_merge(path, inner, of_base, described)
        if tied := [n for n in of_base.values() if ties.get(n, n) != n or n in shared]:
            raise CheckpointContentError(
                f"merged=True: {tied[0]} is tied to another parameter, which would change too: "
                "save the adapter alone"
            )
        found.append(Merge(names, of_base, begins.removesuffix("base_layer."), inner))
    return kept, found


def _check_merge(
    path: str, layer: Any, of_base: Mapping[str, str], described: Mapping[str, Description]
) -> None:
    packed = [n for n in of_base.values() if not described[n][1].is_floating_point]
    if packed:
        raise CheckpointContentError(
            f"merged=True: {packed[0]} is quantized ({described[packed[0]][1]}): save the adapter "
            "alone, and merge it into a model of the plain weights: Trainer(weights="
            "PretrainedWeights(base, adapter=folder))"
        )
    if hasattr(layer, "unload_and_optionally_merge_module") or hasattr(layer, "parameter_name"):
        raise CheckpointContentError(
            f"merged=True: {path[:-1]} is a {type(layer).__name__} of PEFT, which is not merged "
            "layer by layer: save the adapter alone, and merge it with merge_and_unload"
        )


def _inner(layer: Any) -> str:
    """Return the prefix, within a layer of PEFT, of the layer that stays when it is taken away."""
    if hasattr(layer, "modules_to_save"):
        active = list(layer.active_adapters)
        return f"modules_to_save.{active[0]}." if active else "original_module."
    return "token_adapter.base_layer." if hasattr(layer, "token_adapter") else "base_layer."


def _layers(adapted: Adapted) -> Iterator[tuple[str, Any]]:
    """Yield the outermost layers of PEFT by the prefixes of their names in the module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    outer: list[str] = []
    for path, part in adapted.model.named_modules():
        if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            prefix = f"{adapted.prefix}{path}."
            if not any(prefix.startswith(one) for one in outer[-1:]):
                outer.append(prefix)
                yield prefix, part


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for depth in range(1, len(parts)):
        yield ".".join(parts[:depth]) + "."


def _rebuilt(module: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """Return a copy of a module that has other tensors and shares no state with it."""
    new: Any = object.__new__(_plain_class(type(module)))
    new.__dict__.update(
        {
            key: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for key, value in module.__dict__.items()
        }
    )
    as_parameter: Callable[[Tensor], Tensor] = partial(nn.Parameter, requires_grad=False)
    for kind, make in (("_parameters", as_parameter), ("_buffers", torch.Tensor.detach)):
        new.__dict__[kind] = {
            key: make(tensors[prefix + key]) if prefix + key in tensors else value
            for key, value in module.__dict__[kind].items()
        }
    for name, value in tensors.items():
        key = name.removeprefix(prefix)
        # A stage of a pipeline has plain attributes in place of the parameters of others.
        if name.startswith(prefix) and key in new.__dict__:
            del new.__dict__[key]
            new.__dict__["_parameters"][key] = as_parameter(value)
    new.__dict__["_modules"] = {
        key: None if child is None else _rebuilt(child, tensors, f"{prefix}{key}.")
        for key, child in module._modules.items()
    }
    return new


def _plain_class(kind: type) -> type:
    """Return the class that FSDP has derived another one of."""
    return next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))


def _kind(config: Any) -> str:
    return getattr(config.peft_type, "value", str(config.peft_type))
