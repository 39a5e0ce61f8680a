"""A new folder of safetensors: its files, tensor by tensor, its index, configs and tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from stratagem.errors import (
    CheckpointContentError,
    CheckpointSaveError,
    ConfigurationError,
    StratagemError,
)
from stratagem.storage import DurableDirectory
from stratagem_extras.pretrained.folder import DTYPES, INDEX, SINGLE, bytes_in

Description = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""
_BLOCK = 8 << 20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""The suffixes of files of configs and tokenizers, which are copied."""


class FolderWriter:
    """Writes a folder of safetensors; each tensor goes to its place when it comes.

    Args:
        folder: an existing folder.
        tensors: the shape and dtype of each tensor, by name.
        max_shard_size: the most bytes of a file, except of a file with one tensor; None: one file.
        single: the name of a single file.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        max_shard_size: int | None,
        single: str = SINGLE,
    ) -> None:
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        self.total = sum(sizes.values())
        files: list[list[str]] = [[]]
        most = self.total if max_shard_size is None else max_shard_size
        room = most
        for name, size in sizes.items():
            if files[-1] and size > room:
                files.append([])
                room = most
            files[-1].append(name)
            room -= size
        self.names = [single]
        if len(files) > 1:
            count = len(files)
            self.names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        self._folder = folder
        self._tensors = dict(tensors)
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files: list[BinaryIO] = []
        for file, own in zip(self.names, files, strict=True):
            self._begin(folder / file, own)
        if len(files) > 1:
            weight_map = {n: f for f, own in zip(self.names, files, strict=True) for n in own}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _begin(self, path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        known = {dtype: text for text, dtype in DTYPES.items()}
        places, end = {}, 0
        # Those with the largest elements first, so that each is aligned to its elements.
        for name in sorted(names, key=lambda name: -self._tensors[name][1].itemsize):
            shape, dtype = self._tensors[name]
            places[name], first = end, end
            end += prod(shape) * dtype.itemsize
            offsets = [first, end]
            header[name] = {"dtype": known[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("wb", buffering=0)
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        self._places |= {name: (file, 8 + len(text) + place) for name, place in places.items()}

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write elements of a tensor, from the number `first` on, in the announced dtype."""
        file, place = self._places[name]
        dtype = self._tensors[name][1]
        file.seek(place + first * dtype.itemsize)
        flat = tensor.detach().reshape(-1)
        at_once = _BLOCK // dtype.itemsize
        for begin in range(0, len(flat), at_once):
            block = flat[begin : begin + at_once].to("cpu", dtype).resolve_conj().contiguous()
            memory = bytes_in(block)
            while len(memory):
                memory = memory[file.write(memory) :]

    def finish(self) -> None:
        """Sync all files to the disk, and close them."""
        for file in self._files:
            os.fsync(file.fileno())
        for path in self._folder.iterdir():
            with path.open("rb") as other:
                os.fsync(other.fileno())
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class NewFolder:
    """A folder of weights that is written beside its path, and moved there at the end.

    Args:
        path: the new folder.
        tensors: the shape and dtype of each tensor, by the name to write.
        dtype: the dtype of floating-point tensors; None: their own.
        max_shard_size: the most bytes of a file; None: one file.
        single: the name of a single file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, Description],
        dtype: torch.dtype | str | None,
        max_shard_size: int | str | None,
        single: str = SINGLE,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self.dtype = parse_dtype(dtype)
        size = None if max_shard_size is None else parse_size(max_shard_size)
        for name, (_, own) in tensors.items():
            if own not in DTYPES.values():
                raise CheckpointContentError(
                    f"cannot write {str(self.path)!r}: {name} is a tensor of {own}, which the "
                    "format does not have: convert it first"
                )
        if os.path.lexists(self.path):
            raise ConfigurationError(
                f"{str(self.path)!r} is there already; expected a new path: remove it first, or "
                "write elsewhere"
            )
        self.tensors = {
            name: (shape, self.dtype if self.dtype and own.is_floating_point else own)
            for name, (shape, own) in tensors.items()
        }
        with self._saving():
            self._directory = DurableDirectory(self.path)
            try:
                self._writer = FolderWriter(self._directory.temporary, self.tensors, size, single)
            except BaseException:
                self._directory.close()
                raise

    @property
    def total(self) -> int:
        """The bytes of all tensors."""
        return self._writer.total

    @property
    def files(self) -> int:
        """The number of files with tensors."""
        return len(self._writer.names)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StratagemError):
                raise
            raise CheckpointSaveError(
                f"cannot write {str(self.path)!r}: {type(error).__name__}: {error}; nothing is "
                "there",
                errno=error.errno,
            ) from error

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Remove the new folder if the block fails."""
        try:
            with self._saving():
                yield
        except BaseException:
            self._writer.close()
            self._directory.close()
            raise

    def add_files(self, like: str | os.PathLike[str] | None, model: Any = None) -> None:
        """Copy configs and the tokenizer of a folder, or write the configs of a model."""
        with self._or_nothing():
            folder = self._directory.temporary
            if like is not None and Path(like).is_dir():
                for file in sorted(Path(like).iterdir()):
                    if file.is_file() and file.suffix in _BESIDE and file.name != INDEX:
                        shutil.copyfile(file, folder / file.name)
            for name in ("config", "generation_config"):
                config: Any = getattr(model, name, None)
                if hasattr(config, "save_pretrained"):
                    config.save_pretrained(folder)
            self._set_dtype(folder / "config.json")

    def add_json(self, name: str, content: Any) -> None:
        """Write a file of JSON, as PEFT does."""
        with self._or_nothing():
            text = json.dumps(content, indent=2, sort_keys=True)
            (self._directory.temporary / name).write_text(text)

    def _set_dtype(self, config: Path) -> None:
        """Let a config name the dtype of the weights, in which a reader loads them."""
        kinds = {dtype for _, dtype in self.tensors.values() if dtype.is_floating_point}
        if not config.exists() or len(kinds) != 1:
            return
        entries = json.loads(config.read_text())
        key = "torch_dtype" if "torch_dtype" in entries else "dtype"
        entries[key] = str(kinds.pop()).removeprefix("torch.")
        config.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write elements of a tensor, from the number `first` on."""
        with self._or_nothing():
            self._writer.write(name, tensor, first)

    def commit(self) -> None:
        """Let the folder appear."""
        with self._or_nothing():
            self._writer.finish()
            self._directory.commit()


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that floating-point tensors are written in.

    Raises:
        ConfigurationError: the argument is no floating-point dtype of the format.

    Example:
        >>> parse_dtype("bfloat16")
        torch.bfloat16
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    floating = {one for one in DTYPES.values() if one.is_floating_point}
    if dtype is not None and found not in floating:
        raise ConfigurationError(
            f"dtype={dtype!r}: expected a floating-point dtype, such as 'bfloat16'"
        )
    return found


def parse_size(size: int | str) -> int:
    """Return a number of bytes.

    Raises:
        ConfigurationError: the argument is no size.

    Example:
        >>> parse_size("5GB")
        5000000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B)?", str(size).strip(), re.IGNORECASE)
    unit = "" if match is None else (match[2] or "").upper()
    if match is None or unit == "B" or float(match[1]) * _UNITS[unit] < 1:
        raise ConfigurationError(
            f"max_shard_size={size!r}: expected bytes, or a text such as '5GB' or '500MB'"
        )
    return int(float(match[1]) * _UNITS[unit])
