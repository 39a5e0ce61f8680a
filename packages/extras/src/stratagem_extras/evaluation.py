"""A checkpoint or a folder as a model that lm-eval runs its tasks on."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.checkpoint import LazyTensor
from stratagem.discovery import nearest_of
from stratagem.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    format_names,
    format_text,
)
from stratagem_extras.checkpoints.weights import open_weights
from stratagem_extras.pretrained.names import Names, check_names, match_names, tensors_of, ties_of

_FILES_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def evaluate_model(
    source: Path,
    tasks: str,
    model: str | None = None,
    *,
    tokenizer: Path | None = None,
    include_path: Path | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    device: str | None = None,
    dtype: str | None = None,
    key: str | None = None,
    format: str = "",
) -> dict[str, Any]:
    """Run tasks of lm-eval on a model in one process; return their values.

    Args:
        source: a folder in Hugging Face's layout, or a checkpoint of any strategy.
        tasks: names of tasks, separated by commas, with wildcards.
        model: "module:function", which returns the model of a checkpoint: a model of transformers
            or PEFT, or a Module with one model of them.
        tokenizer: a folder. None: the source, or the folder that the model was read from.
        include_path: a folder with YAML files of tasks.
        few_shot: the number of examples in the context. None: the number of each task.
        limit: the number of samples of each task. None: all of them.
        batch_size: the number of requests in a batch.
        device: the device. None: a GPU, else the CPU.
        dtype: the dtype of the weights, such as "bfloat16". None: unchanged.
        key: the entry of the checkpoint with the weights. None: the only possible entry.
        format: the format of the checkpoint. "": the installed format that can load it.

    Returns:
        "tasks": for each task the "metrics", their "stderr", and the number of "samples".

    Raises:
        ConfigurationError: a task, the model or the tokenizer is missing.
        CheckpointError: the source cannot be read, or its weights belong to another model.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # Before the weights are read, which takes long.
    manager, names = _find_tasks(tasks, include_path)
    built = _read_model(source, model, key, format)
    if dtype is not None:
        built = built.to(_dtype(dtype))
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        built = built.to(device or usual).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"--device {device or usual}: the model cannot be moved there "
            f"({type(error).__name__}: {format_text(str(error), 200)})"
        ) from error
    lm = HFLM(
        pretrained=built,
        tokenizer=_read_tokenizer(source, tokenizer, built),
        batch_size=batch_size,
    )
    found = simple_evaluate(
        model=lm,
        tasks=names,
        num_fewshot=few_shot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None  # this process is rank 0
    return {"tasks": {task: _values(found, task) for task in found["results"]}}


def _values(found: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the values of a task, by metric and filter as lm-eval names them."""
    values = {
        name: value
        for name, value in found["results"][task].items()
        if "," in name and isinstance(value, (int, float))
    }
    metrics = {n: value for n, value in values.items() if "_stderr," not in n}
    errors = {n.replace("_stderr,", ","): v for n, v in values.items() if "_stderr," in n}
    samples = found.get("n-samples", {}).get(task, {}).get("effective")
    return {"metrics": metrics, "stderr": errors, "samples": samples}


def _find_tasks(given: str, include_path: Path | None) -> tuple[Any, list[str]]:
    """Return the tasks of lm-eval, and the names of the wanted ones.

    Raises:
        ConfigurationError: lm-eval has no task of a name.
    """
    from lm_eval.tasks import TaskManager

    wanted = [name.strip() for name in given.split(",") if name.strip()]
    if not wanted:
        raise ConfigurationError("--tasks: expected names of tasks, such as hellaswag,arc_easy")
    folder = None if include_path is None else str(include_path)
    if folder is not None:
        # The index of lm-eval's own tasks takes 10 seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        names = [manager.match_tasks([name]) for name in wanted]
        if all(names):
            return manager, _flat(names)
    manager = TaskManager(include_path=folder)
    names = [manager.match_tasks([name]) for name in wanted]
    for name, matched in zip(wanted, names, strict=True):
        if not matched:
            near = nearest_of(name, list(manager.all_tasks))
            raise ConfigurationError(
                f"--tasks {format_text(name)}: lm-eval has no such task"
                + (f". Did you mean {near!r}?" if near else ".")
                + " `lm-eval ls tasks` lists them; --include-path adds a folder of your own"
            )
    return manager, _flat(names)


def _flat(names: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for some in names for name in some))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"--dtype {format_text(name)}: expected a floating-point dtype of torch, such as "
            "bfloat16"
        )
    return dtype


def _read_model(source: Path, model: str | None, key: str | None, form: str) -> Any:
    """Return the model with the weights of a source."""
    if not source.exists():
        raise CheckpointNotFoundError(f"{str(source)!r}: there is no such checkpoint or folder")
    if source.is_dir() and (source / "config.json").is_file():
        return _read_folder(source, model)
    if model is None:
        raise ConfigurationError(
            f"{str(source)!r} has weights, but no model: expected --model module:function, which "
            "returns it, or a folder with a config.json"
        )
    built = _part(_built(model), model)
    _load(built, source, key, form)
    return built


def _read_folder(source: Path, model: str | None) -> Any:
    import transformers

    if model is not None:
        raise ConfigurationError(
            f"--model {model}: {str(source)!r} has a config.json, from which its model is built: "
            "leave --model out"
        )
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            source, local_files_only=True, dtype="auto"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{str(source)!r} has no language model that transformers can read: "
            f"{type(error).__name__}: {format_text(str(error), 500)}"
        ) from error


def _built(model: str) -> Any:
    """Return the model that a function of the user returns."""
    module, _, attribute = model.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--model {format_text(model)} cannot be built: {type(error).__name__}: "
            f"{format_text(str(error), 300)}. Expected module:function, found from this folder or "
            "installed, which takes no argument and returns the model"
        ) from error


def _part(built: Any, model: str) -> Any:
    """Return the model of transformers or PEFT in a module."""
    from transformers import PreTrainedModel

    found: list[nn.Module] = []
    inside: set[int] = set()
    for part in built.modules() if isinstance(built, nn.Module) else ():
        if id(part) in inside:
            continue
        if isinstance(part, PreTrainedModel) or hasattr(part, "get_base_model"):
            found.append(part)
            inside.update(id(each) for each in part.modules())
    if len(found) != 1:
        names = format_names([type(part).__name__ for part in found])
        raise ConfigurationError(
            f"--model {model} returned a {type(built).__name__} with {len(found)} models of "
            f"transformers{f' ({names})' if names else ''}: expected one, since lm-eval runs "
            "models of transformers"
        )
    return found[0]


def _load(model: nn.Module, source: Path, key: str | None, form: str) -> None:
    """Load the weights of a checkpoint, one tensor at a time.

    Raises:
        CheckpointMismatchError: the weights belong to another model.
    """
    stored = open_weights(source, key, form).tensors
    own = model.state_dict(keep_vars=True)
    shapes = tensors_of(own)
    try:
        names = _in_place(list(shapes), stored) or match_names(list(shapes), list(stored), model)
        check_names(
            names, shapes, {n: tuple(value.shape) for n, value in stored.items()}, ties_of(own)
        )
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            f"{str(source)!r}: {error}", error.missing, error.unexpected
        ) from error
    with torch.no_grad():
        for name, saved in names.sources.items():
            value: Tensor | LazyTensor = stored[saved]
            own[name].copy_(value.whole() if isinstance(value, LazyTensor) else value)


def _in_place(own: Sequence[str], stored: Collection[str]) -> Names | None:
    """Return the names of a model that a checkpoint has all below one prefix, as they are.

    A model with adapters of PEFT is found so, whose names are not those of a folder.
    """
    for prefix in (name.removesuffix(own[0]) for name in stored if name.endswith(own[0])):
        if all(prefix + name in stored for name in own):
            return Names({name: prefix + name for name in own}, lacks=prefix)
    return None


def _read_tokenizer(source: Path, given: Path | None, model: Any) -> Any:
    """Return the tokenizer of a model; nothing is downloaded."""
    import transformers

    own = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    places = [given] if given is not None else [source, *([Path(own)] if own else [])]
    for place in places:
        if place.is_dir() and any((place / name).is_file() for name in _FILES_OF_TOKENIZERS):
            return transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    tried = " and ".join(repr(str(place)) for place in dict.fromkeys(places))
    raise ConfigurationError(
        f"there is no tokenizer in {tried}: expected --tokenizer FOLDER, a folder with a "
        "tokenizer.json, such as that of the model before training"
    )
