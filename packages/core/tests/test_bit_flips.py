"""One flipped bit anywhere in a checkpoint is found, in every format, before anything is loaded."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.checkpoint import CheckpointIO
from stratagem.discovery.registry import get_registry
from stratagem.errors import CheckpointCorruptError
from stratagem.testing.durability.harness import formats

# 9 MB: more than one piece of those in which a file is read.
CONTENTS: dict[str, Any] = {
    "number": 7,
    "weights": [torch.full((450_000,), float(number)) for number in range(5)],
}


def files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def flip(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ (1 << bit)]))


def leave_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture(params=formats())
def io(request: pytest.FixtureRequest) -> CheckpointIO:
    built: CheckpointIO = get_registry().find("checkpoint_io", request.param).spec.build()
    return built


def test_200_flipped_bits_are_found_and_the_file_is_named_before_anything_is_loaded(
    io: CheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.ckpt"
    io.save_checkpoint(CONTENTS, path)
    files = files_of(path)
    sizes = [file.stat().st_size for file in files]
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was loaded from a damaged checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", load)
        for number in range(200):
            # Each file gets its share; small ones, such as a manifest, no fewer.
            weights = [1.0] * len(files) if number % 2 else sizes
            [index] = chance.choices(range(len(files)), weights)
            position, bit = chance.randrange(sizes[index]), chance.randrange(8)
            flip(files[index], position, bit)
            if number % 10 == 0:
                leave_page_cache(files[index])
            with pytest.raises(CheckpointCorruptError) as caught:
                io.load_checkpoint(path)
            assert str(files[index]) in str(caught.value)
            flip(files[index], position, bit)
    assert torch.equal(io.load_checkpoint(path)["weights"][4], CONTENTS["weights"][4])


def test_a_file_system_that_cannot_tell_what_is_in_memory_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io: CheckpointIO = get_registry().find("checkpoint_io", "single_file").spec.build()
    io.save_checkpoint(CONTENTS, tmp_path / "model.ckpt")

    def unsupported(*args: Any) -> int:
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert io.load_checkpoint(tmp_path / "model.ckpt")["number"] == 7
    flip(tmp_path / "model.ckpt", 8_000_000, 3)
    with pytest.raises(CheckpointCorruptError, match="is damaged"):
        io.load_checkpoint(tmp_path / "model.ckpt")
