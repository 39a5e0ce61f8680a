"""One flipped bit anywhere in a checkpoint is found, in every format, before anything is loaded."""

from __future__ import annotations

import json
import os
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from stratagem.checkpoint import CheckpointIO
from stratagem.checkpoint.checksum import checksum_of_file
from stratagem.discovery.registry import get_registry
from stratagem.errors import CheckpointCorruptError
from stratagem.state.reading.unpickler import SafeUnpickler

SAVED_BEFORE = Path(__file__).parents[1] / "files" / "single_file_0.1.0.zip"
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


FORMATS = [
    candidate.spec.name
    for candidate in get_registry().candidates("checkpoint_io")
    if not candidate.spec.build().asynchronous
]


@pytest.fixture(params=FORMATS)
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
        patch.setattr(SafeUnpickler, "load", load)
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


def test_load_checkpoint_works_without_preadv(
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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three pieces, which two threads compare."""
    path = tmp_path_factory.mktemp("large") / "model.ckpt"
    weights = torch.arange(36_000_000, dtype=torch.int32)
    get_registry().find("checkpoint_io", "single_file").spec.build().save_checkpoint(
        {"weights": weights}, path
    )
    return path


def seal_of(path: Path) -> str:
    return path.read_bytes()[-32:].decode()


def test_checksum_of_a_large_file_combines_its_pieces(large: Path) -> None:
    data, piece = large.read_bytes()[:-32], 64 << 20
    assert len(data) > 2 * piece
    digests = [xxhash.xxh3_128_digest(data[at : at + piece]) for at in range(0, len(data), piece)]
    assert seal_of(large) == xxhash.xxh3_128_hexdigest(b"".join(digests))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("position", [5_000_000, (64 << 20) - 1, 64 << 20, 140_000_000])
def test_a_flipped_bit_in_any_piece_of_a_large_file_is_found(
    position: int, cached: bool, large: Path
) -> None:
    io: CheckpointIO = get_registry().find("checkpoint_io", "single_file").spec.build()
    flip(large, position, 3)
    if not cached:
        leave_page_cache(large)
    try:
        with pytest.raises(CheckpointCorruptError, match="is damaged: its contents have the check"):
            io.load_checkpoint(large)
    finally:
        flip(large, position, 3)
    if not cached:
        leave_page_cache(large)
    assert io.load_checkpoint(large)["weights"][-1] == 35_999_999


def test_a_flipped_bit_in_a_file_of_format_version_1_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    with zipfile.ZipFile(SAVED_BEFORE) as archive:
        assert json.loads(archive.comment.split(b"\n")[1])["format_version"] == 1
    path.write_bytes(SAVED_BEFORE.read_bytes())
    io: CheckpointIO = get_registry().find("checkpoint_io", "single_file").spec.build()
    assert io.load_checkpoint(path)["global_step"] == 7
    size = path.stat().st_size
    for position in (0, size // 2, size - 40, size - 1):
        flip(path, position, 1)
        with pytest.raises(CheckpointCorruptError):
            io.load_checkpoint(path)
        flip(path, position, 1)


class Counted:
    """Counts the calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def test_load_after_verify_checkpoint_skips_one_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(checksum_of_file)
    monkeypatch.setattr("stratagem.checkpoint.archive.checksum_of_file", counted)
    io: CheckpointIO = get_registry().find("checkpoint_io", "single_file").spec.build()
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    for number, path in enumerate((first, second)):
        io.save_checkpoint({"number": number}, path)

    io.verify_checkpoint(first)
    assert io.load_checkpoint(first) == {"number": 0}
    assert counted.calls == 1
    assert io.load_checkpoint(first) == {"number": 0}  # only once for each time that it was
    assert counted.calls == 2

    io.verify_checkpoint(first)
    assert io.load_checkpoint(second) == {"number": 1}
    assert counted.calls == 4

    io.verify_checkpoint(first)
    second.replace(first)
    assert io.load_checkpoint(first) == {"number": 1}
    assert counted.calls == 6

    io.verify_checkpoint(first)
    time.sleep(0.02)  # more than a tick of the clock by which files are dated
    flip(first, 100, 1)
    with pytest.raises(CheckpointCorruptError):
        io.load_checkpoint(first)
