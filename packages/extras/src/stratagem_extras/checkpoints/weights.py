"""What the command line does with the weights of checkpoints: convert them, average them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem import __version__
from stratagem.checkpoint import (
    FORMAT_VERSION,
    CheckpointIO,
    LazyTensor,
    check_trainer_checkpoint,
    consolidate_checkpoint,
)
from stratagem.discovery import get_registry, require_package
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointSaveError,
    ConfigurationError,
    format_names,
    format_text,
)
from stratagem.storage import DurableDirectory, sync_directory
from stratagem_extras.checkpoints.inspection import find_format

_OF_TRAINER = "state_dict"
# Counts of steps, which differ between any two checkpoints of one run.
_COUNTS = "num_batches_tracked"


def consolidate(source: Path, target: Path) -> str:
    """Write a directory checkpoint, or a checkpoint of a plugin's format, as a file.

    Returns:
        A description of the result.

    Raises:
        CheckpointError: the source is damaged, or the target exists.
    """
    about = ""
    try:
        consolidate_checkpoint(source, target)
    except CheckpointCorruptError as error:
        form, contents = _read_another(source, error)
        _io().save_checkpoint(contents, target)
        about = f", of a checkpoint of the format {form!r}"
    return f"{target}: {target.stat().st_size} bytes{about}"


def convert(
    source: Path,
    target: Path,
    key: str | None = None,
    to: str = "safetensors",
    form: str = "",
    layout: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint's weights as safetensors; return a description of the result.

    Args:
        source: a checkpoint of any format, Lightning's among them; for "checkpoint", a folder of
            safetensors.
        target: the new file.
        key: which entry of the checkpoint are the weights; None: the one that can be.
        to: "safetensors"; "huggingface": a folder of them; "lightning": all of a Trainer's
            checkpoint, in Lightning's form; or "checkpoint": one of weights, of a folder.
        form: the name of the source's format; "": the installed one that can load it.
        layout: options of a folder: see `convert_to_folder`. For "checkpoint", "like" alone: a
            checkpoint of the model, whose names the weights get.

    Raises:
        ConfigurationError: the target is there already, or is not to be a safetensors file.
        MissingPackageError: the library safetensors is not installed.
        CheckpointError: the source cannot be read or has no weights, or the target not be written.
    """
    if to == "checkpoint" and set(layout or ()) <= {"like"}:
        return _from_huggingface(source, target, (layout or {}).get("like"), key)
    if layout and to != "huggingface":
        raise ConfigurationError(
            f"{', '.join(layout)}: expected to='huggingface' with it, received to={to!r}"
        )
    if to == "lightning":
        return _to_lightning(source, target, form)
    if to == "huggingface":
        return _to_huggingface(source, target, key, form, layout or {})
    if to != "safetensors":
        raise ConfigurationError(
            f"to={to!r}: expected 'safetensors', 'huggingface', 'lightning' or 'checkpoint'"
        )
    if target.suffix != ".safetensors":
        raise ConfigurationError(
            f"convert writes safetensors files: expected a target that ends in .safetensors, "
            f"received {str(target)!r}"
        )
    _refuse_existing(target)
    for package in ("safetensors", "numpy"):  # the library imports numpy
        require_package("convert", package, extra="safetensors")
    weights, left_out = _weights(_read(source, form), source, key)
    try:
        size = _write_safetensors(weights, target)
    except OSError as error:
        state = "nothing is there"
        if target.exists():
            state = "it is in its place, but may be lost in a power cut"
        raise CheckpointSaveError(
            f"cannot write {str(target)!r}: {type(error).__name__}: {error}; {state}",
            errno=error.errno,
        ) from error
    summary = f"{target}: {len(weights)} tensors, {size} bytes"
    if left_out:
        summary += f"; left out, since they are no tensors: {', '.join(left_out)}"
    return summary


def _write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Write tensors by name, each on its own even if some share memory; return the file's size.

    The library writes to a temporary name and renames it, without fsync. So it writes into a
    temporary directory, from which the durable file is moved to the path.

    Raises:
        CheckpointContentError: the format does not support a tensor; names it.
        OSError: the file system refused.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    separate: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise _unsupported(path, name, tensor)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage().data_ptr()
        # The library refuses tensors that share memory.
        separate[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    directory = DurableDirectory(path)
    try:
        file = directory.temporary / path.name
        try:
            save_file(separate, file, metadata={"format": "pt"})
        except KeyError as error:
            name = next(name for name, each in separate.items() if each.dtype == error.args[0])
            raise _unsupported(path, name, tensors[name]) from error
        except SafetensorError as error:
            raise OSError(str(error)) from error
        # The library's file has mode 0600; a new file has the mode that the umask leaves.
        file.chmod(directory.temporary.stat().st_mode & 0o666)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        size = file.stat().st_size
        file.replace(path)
        sync_directory(path.parent)
    finally:
        directory.close()
    return size


def _unsupported(path: Path, name: str, tensor: Tensor) -> CheckpointContentError:
    return CheckpointContentError(
        f"cannot write {str(path)!r}: {name} is a tensor of {tensor.dtype} ({tensor.layout}); a "
        "safetensors file stores dense tensors of the usual dtypes: leave it out or convert it"
    )


def _to_huggingface(
    source: Path, target: Path, key: str | None, form: str, layout: Mapping[str, Any]
) -> str:
    """Write a folder; the tensors of a checkpoint that is a directory are read one by one."""
    from stratagem_extras.pretrained.convert import convert_to_folder

    _refuse_existing(target)
    stored = open_weights(source, key, form)
    options = {"like": None, "dtype": None, "max_shard_size": "5GB", **layout}
    summary = convert_to_folder(stored.tensors, target, **options, adapters=stored.adapters)
    if stored.left_out:
        summary += f"; left out, since they are no tensors: {', '.join(stored.left_out)}"
    return summary


def _from_huggingface(source: Path, target: Path, like: Path | None, key: str | None) -> str:
    """Write a checkpoint of the weights in a folder, by the names in another checkpoint."""
    from stratagem_extras.pretrained.convert import read_folder

    _refuse_existing(target)
    weights = read_folder(source, None if like is None else open_weights(like, key).tensors)
    checkpoint = {"stratagem_version": __version__, "format_version": FORMAT_VERSION}
    _io().save_checkpoint({**checkpoint, _OF_TRAINER: weights}, target)
    return f"{target}: {target.stat().st_size} bytes, {len(weights)} tensors, weights only"


class StoredWeights(NamedTuple):
    """The weights in a checkpoint."""

    tensors: dict[str, Tensor | LazyTensor]
    """By name; those of a checkpoint that is a directory stay there until they are read."""
    left_out: list[str]
    """The names of values that are no tensors."""
    adapters: dict[str, Any]
    """The config of each adapter of PEFT, by its name."""


def open_weights(source: Path, key: str | None = None, form: str = "") -> StoredWeights:
    """Return the weights of a checkpoint of any format.

    Args:
        source: the checkpoint.
        key: the entry with the weights. Default: the only possible entry.
        form: the name of the format. Default: the installed format that can load it.

    Raises:
        CheckpointError: the source cannot be read, or has no weights.
    """
    try:
        checkpoint = _io().open_checkpoint(source) if not form else _read(source, form)
    except CheckpointCorruptError as error:
        checkpoint = _read_another(source, error)[1]
    state = checkpoint[_entry(checkpoint, source, key)]
    tensors = {n: value for n, value in state.items() if isinstance(value, (Tensor, LazyTensor))}
    adapters = checkpoint.get("adapters")
    if not isinstance(adapters, dict) or any("peft_type" not in one for one in adapters.values()):
        adapters = {}
    return StoredWeights(tensors, [name for name in state if name not in tensors], adapters)


def _to_lightning(source: Path, target: Path, form: str) -> str:
    spec = get_registry().find("checkpoint_io", "lightning").spec
    _refuse_existing(target)
    checkpoint = check_trainer_checkpoint(_read(source, form), source)
    checkpoint.setdefault("format_version", FORMAT_VERSION)
    spec.build().save_checkpoint(checkpoint, target)
    kept = "all that Lightning resumes from" if "progress" in checkpoint else "weights only"
    return f"{target}: {target.stat().st_size} bytes, {kept}"


def average(sources: Sequence[Path], target: Path, key: str | None = None) -> str:
    """Write a checkpoint with the mean weights of others; return a description of the result.

    Floating-point numbers are averaged in float64 and stored in their own dtype. Integers must be
    equal, except the number of batches of a batch norm layer, where the largest is used. Other
    entries except the hyperparameters are omitted: training does not resume from a mean.

    Args:
        sources: at least two checkpoints of one model, of any format.
        target: the new checkpoint, a single file.
        key: the entry of the checkpoints with the weights; None: the only possible entry.

    Raises:
        ConfigurationError: the target exists, or no weights can be averaged.
        CheckpointMismatchError: the checkpoints belong to different models; the message has the
            differences.
        CheckpointError: a source cannot be read, or the target cannot be written.
    """
    if len(sources) < 2:
        raise ConfigurationError(
            f"average needs at least two checkpoints, received {len(sources)}: "
            f"{', '.join(map(str, sources))}"
        )
    _refuse_existing(target)
    checkpoints = [_read(source) for source in sources]
    several = [
        _weights(checkpoint, source, key)[0]
        for checkpoint, source in zip(checkpoints, sources, strict=True)
    ]
    for source, weights in zip(sources[1:], several[1:], strict=True):
        _compare(several[0], sources[0], weights, source)
    mean = {name: _mean(name, [w[name] for w in several], sources) for name in several[0]}
    first, entry = checkpoints[0], _entry(checkpoints[0], sources[0], key)
    checkpoint: dict[str, Any] = {"stratagem_version": __version__, entry: mean}
    for kept in ("format_version", "hyper_parameters"):
        if kept in first:
            checkpoint[kept] = first[kept]
    _io().save_checkpoint(checkpoint, target)
    return f"{target}: the mean of {len(sources)} checkpoints, {len(mean)} tensors"


def _io() -> CheckpointIO:
    """Return what writes a file, and reads a directory as well."""
    io: CheckpointIO = get_registry().find("checkpoint_io", "single_file").spec.build()
    return io


def _read(source: Path, form: str = "") -> dict[str, Any]:
    """Return a checkpoint of any installed format; `form`: of that one."""
    if form:
        return find_format(source, form)[1].load_checkpoint(source)
    try:
        return _io().load_checkpoint(source)
    except CheckpointCorruptError as error:
        return _read_another(source, error)[1]


def _read_another(source: Path, error: CheckpointCorruptError) -> tuple[str, dict[str, Any]]:
    """Return a checkpoint in a plugin's format, with its name.

    Raises:
        CheckpointError: no installed format can load it.
    """
    try:
        form, checkpoint_io = find_format(source)
        return form, checkpoint_io.load_checkpoint(source)
    except CheckpointFormatError as of_all:
        raise (of_all if isinstance(error, CheckpointFormatError) else error) from None


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigurationError(
            f"{str(target)!r} is there already; expected a new path: remove it first, or write "
            "elsewhere"
        )


def _entry(checkpoint: dict[str, Any], source: Path, key: str | None) -> str:
    """Return the name of the entry that has the weights."""
    if key is not None:
        if not isinstance(checkpoint.get(key), dict):
            raise CheckpointMismatchError(
                f"{str(source)!r} has no weights under {key!r}; it has "
                f"{format_names(checkpoint, 20)}"
            )
        return key
    if isinstance(checkpoint.get(_OF_TRAINER), dict):
        return _OF_TRAINER
    fitting = [
        name
        for name, value in checkpoint.items()
        if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values())
    ]
    if len(fitting) != 1:
        raise CheckpointMismatchError(
            f"{str(source)!r} has {len(fitting)} entries that may be weights "
            f"({format_names(fitting, 20) or 'of ' + format_names(checkpoint, 20)}): say which, by "
            "--key"
        )
    return fitting[0]


def _weights(
    checkpoint: dict[str, Any], source: Path, key: str | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors by name, and the names of what is none."""
    state = checkpoint[_entry(checkpoint, source, key)]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, [name for name in state if name not in tensors]


def _compare(
    one: dict[str, Tensor], source: Path, other: dict[str, Tensor], other_source: Path
) -> None:
    only_one, only_other = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    differing = [
        f"{format_text(name)} is {tuple(one[name].shape)} {one[name].dtype} and "
        f"{tuple(other[name].shape)} {other[name].dtype}"
        for name in one.keys() & other.keys()
        if (one[name].shape, one[name].dtype) != (other[name].shape, other[name].dtype)
    ]
    problems = [
        *([f"only the first has {format_names(only_one)}"] if only_one else []),
        *([f"only the second has {format_names(only_other)}"] if only_other else []),
        *sorted(differing)[:5],
    ]
    if problems:
        raise CheckpointMismatchError(
            f"{str(source)!r} and {str(other_source)!r} are of different models: "
            f"{'; '.join(problems)}. Average checkpoints of one model"
        )


def _mean(name: str, tensors: Sequence[Tensor], sources: Sequence[Path]) -> Tensor:
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()):
        if name.endswith(_COUNTS):
            return torch.stack(list(tensors)).amax(0)
        for tensor, source in zip(tensors, sources, strict=True):
            if not torch.equal(first, tensor):
                raise CheckpointMismatchError(
                    f"{format_text(name)} has no mean, since it holds integers ({first.dtype}), "
                    f"and differs between {str(sources[0])!r} and {str(source)!r}: average "
                    "checkpoints in which it is alike"
                )
        return first
    total = torch.zeros_like(first, dtype=torch.complex128 if first.is_complex() else torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(first.dtype)
