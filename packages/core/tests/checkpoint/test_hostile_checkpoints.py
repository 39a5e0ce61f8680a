"""What a checkpoint that somebody else made may cause: an error that says what is wrong; no more.

All of these have checksums that fit. `test_fuzz_checkpoints.py` looks for more of them.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_archives import Made, Member, parse, seal, sign_directory
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.serialization import skip_data

from stratagem import Lite
from stratagem.checkpoint import (
    DirectoryCheckpointIO,
    Shards,
    SingleFileCheckpointIO,
    trainer_format,
)
from stratagem.checkpoint.catalog import find_all
from stratagem.errors import CheckpointContentError, CheckpointCorruptError
from stratagem.trainer.context import FitState

MANIFEST = b'{"format_version":2,"piece_size":67108864,"stratagem":"0","torch":"2","contents":[]}'
CONTENTS = {"weights": torch.arange(50.0)}


@pytest.fixture(autouse=True)
def _nothing_hangs() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def archive(tmp_path: Path) -> Made:
    """What plain `torch.save` makes."""
    torch.save(CONTENTS, tmp_path / "archive")
    return parse(tmp_path / "archive")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lite = Lite(accelerator="cpu", plugins="directory")
    lite.launch()
    values = torch.arange(400.0)
    chunks = [((0, 0), values[:200].view(10, 20)), ((10, 0), values[200:].view(10, 20))]
    sharded = {"w": Shards((20, 20), torch.float32, chunks)}
    lite.save(tmp_path / "directory", {"model": sharded, "n": 1})
    return tmp_path / "directory"


def refusal(path: Path) -> str:
    """Return why a checkpoint is refused: in the same words however it is opened."""
    said: list[str] = []
    for io in (SingleFileCheckpointIO(), DirectoryCheckpointIO(), SingleFileCheckpointIO()):
        call = io.load_checkpoint if said else io.verify_checkpoint
        with pytest.raises(CheckpointCorruptError) as caught:
            call(path)
        said.append(str(caught.value))
    assert said[0] == said[1] == said[2]
    return said[0]


def refusal_of_pickle(archive: Made, operations: bytes, path: Path) -> str:
    """Return why a checkpoint is refused that has an entry "x" made by these operations."""
    data = b"\x80\x02}X\x01\x00\x00\x00x" + operations + b"s."
    archive.members[0] = replace(archive.members[0], data=data)
    path.write_bytes(seal(archive.encode(), MANIFEST))
    return refusal(path)


# ---------------------------------------------------------------- kinds of files

KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "loop": (lambda path: path.symlink_to(path), "a link"),
    "folder": (Path.mkdir, "a directory"),
}


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_path_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    make, called = KINDS[kind]
    path = tmp_path / "model.ckpt"
    make(path)
    assert refusal(path) == f"'{path}' was refused: it is {called}, expected a regular file"


@pytest.mark.parametrize("name", ["manifest.json", "state.ckpt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_directory_checkpoint_refuses_irregular_files(
    kind: str, name: str, directory: Path
) -> None:
    make, called = KINDS[kind]
    (directory / name).unlink()
    make(directory / name)
    if name != "manifest.json":
        entry = {"size": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
        sign_directory(directory, {}, {name: entry})
    called = "a link" if kind == "device" else called
    assert refusal(directory) == (
        f"'{directory / name}' was refused: it is {called}, expected a regular file"
    )


def test_a_link_out_of_a_directory_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (directory / "state.ckpt").rename(tmp_path / "elsewhere")
    (directory / "state.ckpt").symlink_to(tmp_path / "elsewhere")
    assert "it is a link, expected a regular file" in refusal(directory)


def test_a_link_to_a_checkpoint_is_followed(directory: Path, tmp_path: Path) -> None:
    SingleFileCheckpointIO().save_checkpoint(CONTENTS, tmp_path / "model.ckpt")
    for target in (directory, tmp_path / "model.ckpt"):
        link = tmp_path / f"last-{target.name}"
        link.symlink_to(target.name)
        SingleFileCheckpointIO().verify_checkpoint(link)
        assert SingleFileCheckpointIO().load_checkpoint(link)


def test_other_things_in_a_folder_do_not_end_the_search_for_checkpoints(tmp_path: Path) -> None:
    SingleFileCheckpointIO().save_checkpoint(CONTENTS, tmp_path / "good.ckpt")
    for kind, (make, _) in KINDS.items():
        make(tmp_path / f"{kind}.ckpt")
    assert tmp_path / "good.ckpt" in [entry.path for entry in find_all([tmp_path])]


def test_a_file_that_is_missing_is_named_without_verifying_too(directory: Path) -> None:
    (directory / "state.ckpt").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"state\.ckpt' is damaged: it is missing"):
        DirectoryCheckpointIO(verify=False).load_checkpoint(directory)


# ---------------------------------------------------------------- archives


@pytest.mark.parametrize("is_sealed", [True, False])
def test_an_archive_with_two_lists_of_entries_is_refused(
    is_sealed: bool, archive: Made, tmp_path: Path
) -> None:
    first = archive.encode()
    second = [replace(member) for member in archive.members]
    second[0] = replace(second[0], before=first, data=pickle.dumps({"other": 1}, 2))
    # The locator leads to the record of the first; the one of the second stands before it.
    both = Made(second, locator={"place": len(first) - 98}).encode()
    path = tmp_path / "model.ckpt"
    path.write_bytes(seal(both, MANIFEST) if is_sealed else both)
    assert "the two records at its end disagree on where its entries are" in refusal(path)


def changed(member: Member, kind: str) -> None:
    """Let the records of an entry disagree, or say what torch.save does not."""
    match kind:
        case "local name":
            member.local = {"name_size": 3}
        case "local size":
            member.local = {"size": 1 << 20}
        case "descriptor":
            member.descriptor = {"size": 1 << 20}
        case "encrypted":
            member.listed = {"flags": 0x809}
        case "directory":
            member.listed = {"external": 0x10}
        case "gap":
            member.before = b"nothing"
        case "elsewhere":
            member.listed = {"begin": 1 << 20}
        case "larger":
            member.listed = {"size": 1 << 20, "packed": 1 << 20}
        case "hidden":
            member.is_listed = False


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("local name", "is described in two ways"),
        ("local size", "is described in two ways"),
        ("descriptor", "has another size than it says"),
        ("encrypted", "has the flags 0x809"),
        ("directory", "is marked as a directory"),
        ("gap", "begins at "),
        ("elsewhere", "begins at 1048576, expected "),
        ("larger", "is described in two ways"),
        ("hidden", "begins at "),
    ],
)
def test_an_entry_that_is_described_in_two_ways_is_refused(
    kind: str, said: str, archive: Made, tmp_path: Path
) -> None:
    changed(archive.members[-4], kind)
    path = tmp_path / "model.ckpt"
    path.write_bytes(archive.encode())
    assert said in refusal(path)


def test_bytes_before_or_after_an_archive_are_refused(archive: Made, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"#!/bin/sh\n" + archive.encode())
    assert "the two records at its end disagree" in refusal(path)
    archive.between = b"more"
    path.write_bytes(archive.encode())
    assert "its list of entries ends at " in refusal(path)


def test_tensors_of_more_than_4_gb_and_very_many_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large.ckpt"
    with skip_data():  # the file has holes in their places
        torch.save({"a": torch.empty((1 << 32) + 8, dtype=torch.uint8), "b": torch.ones(3)}, path)
    loaded = SingleFileCheckpointIO().load_checkpoint(path)
    assert (len(loaded["a"]), loaded["b"].shape) == ((1 << 32) + 8, (3,))
    path.unlink()


def test_a_foreign_byte_order_is_turned(archive: Made, tmp_path: Path) -> None:
    for member in archive.members:
        if member.name.endswith("byteorder"):
            member.data = b"big"
        elif member.name.endswith("data/0"):
            member.data = struct.pack(">50f", *range(50))
    path = tmp_path / "model.ckpt"
    path.write_bytes(archive.encode())
    assert torch.equal(
        SingleFileCheckpointIO().load_checkpoint(path)["weights"], torch.arange(50.0)
    )


# ---------------------------------------------------------------- pickles


def laughing(kind: bytes, levels: int) -> bytes:
    """Return the operations of lists or tuples that each hold the one before twice."""
    step = b"h\x01h\x01\x86q\x01" if kind == b"t" else b"](h\x01h\x01eq\x01"
    return b"(K\x01q\x01" + step * levels + b"t"


def colliding(count: int, *, member: bool = False) -> bytes:
    """Return the operations of numbers that have one hash, as keys of None or as members."""
    numbers = [(number * ((1 << 61) - 1)).to_bytes(12, "little") for number in range(1, count + 1)]
    return b"".join(b"\x8a\x0c" + number + b"N" * (not member) for number in numbers)


def storage(key: bytes, count: int) -> bytes:
    """Return the operations that name a storage of `count` floats."""
    named = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + key
    return named + b"X\x03\x00\x00\x00cpuK" + bytes([count]) + b"tQ"


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        (b"c__builtin__\nbytearray\nJ\x00\x00\x00\x70\x85R", "bytes are made of a int"),
        (
            b"]("
            + b"K\x07" * 9000
            + b"eq\x01c__builtin__\nset\nq\x02]("
            + b"h\x02h\x01\x85R" * 9000
            + b"e\x86",
            "its pickle repeats its contents",
        ),
        (laughing(b"t", 60), "repeats its 244 values 4611686018427387843 times"),
        (laughing(b"l", 60), "repeats its 244 values 4611686018427387843 times"),
        (b"}" + laughing(b"t", 60) + b"K\x01s", "its pickle repeats its keys"),
        (
            b"c__builtin__\nset\n](" + laughing(b"t", 60) + b"e\x85R",
            "its pickle repeats its keys",
        ),
        # What a message would show of them doubles with each level.
        (
            b"(" + laughing(b"l", 60) + b"h\x01h\x01h\x01h\x01tQ",
            "its pickle asks for a tuple, expected storages",
        ),
        (
            b"c_codecs\nencode\nX\x01\x00\x00\x00a" + laughing(b"l", 60) + b"\x86R",
            "bytes are made of a str by a tuple",
        ),
        # A key whose hash takes as long as it is, again and again.
        (
            b"}ctorch\nSize\n(" + b"K\x01" * 9000 + b"t\x85Rq\x01N" + b"sh\x01N" * 9000 + b"s",
            "its pickle repeats its keys",
        ),
        (b"}(" + colliding(1002) + b"u", "its pickle has keys that were made to collide"),
        (
            b"c__builtin__\nset\n](" + colliding(1002, member=True) + b"e\x85R",
            "its pickle has keys that were made to collide",
        ),
        (b"]q\x01h\x01a", "contains itself or is nested too deeply"),
        (b"]" * 300 + b"a" * 299, "contains itself or is nested too deeply"),
        (b"c__builtin__\nset\n", "it holds what tensors are made of, in place of tensors"),
        (b"}c__builtin__\nset\nNs", "a key is what makes a value, and no value"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00idna\x86R", "by 'idna'"),
        (b"ctorch\nFloatTensor\nJ\x00\x00\x00\x70\x85R", "torch.FloatTensor"),
        (b"ctorch\nTensor\nN}X\x01\x00\x00\x00aNs\x86b", "a state of a _TensorMeta"),
        (b"ctorch._utils\n_rebuild_tensor\n}b", "a state of a function"),
        (b"K\x01K\x02K\x03s", "a change of a int"),
        (storage(b"K\x03", 4), "names a storage by something else than a text and a size"),
        (
            b"(" + storage(b"X\x01\x00\x00\x000", 50) + storage(b"X\x01\x00\x00\x000", 49) + b"t",
            "its pickle gives the storage '0' two sizes",
        ),
    ],
)
def test_a_pickle_that_would_grow_or_change_classes_is_refused(
    operations: bytes, said: str, archive: Made, tmp_path: Path
) -> None:
    assert said in refusal_of_pickle(archive, operations, tmp_path / "model.ckpt")


def tensor(offset: bytes, size: bytes, stride: bytes, count: bytes = b"K\x32") -> bytes:
    """Return the operations of a tensor of 50 numbers, of which some are other ones."""
    stored = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000N" + count + b"tQ"
    shapes = b"(" + size + b"t(" + stride + b"t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + offset + shapes + b"\x89NtR"


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        (tensor(b"K\x00", b"K\x33", b"K\x01"), "leads out of its storage of 200 bytes"),
        (tensor(b"K\x32", b"K\x01", b"K\x01"), "leads out of its storage of 200 bytes"),
        (tensor(b"J\xff\xff\xff\xff", b"K\x01", b"K\x01"), "a tensor has the offset, size and"),
        (tensor(b"K\x00", b"K\x02", b"J\xff\xff\xff\x7f"), "leads out of its storage"),
        (tensor(b"K\x00", b"J\xff\xff\xff\x7f" * 65, b"K\x00" * 65), "has 65 dims, expected at"),
        (tensor(b"K\x00", b"J\xff\xff\xff\x7f" * 3, b"K\x00" * 3), "leads out of its storage"),
        (tensor(b"K\x00", b"J\xff\xff\xff\x7f", b"K\x00"), "of which only 200 are stored"),
        (tensor(b"K\x00", b"K\x01", b"K\x01", b"K\x33"), "its storage '0' has 200 bytes"),
    ],
)
def test_a_tensor_that_is_not_within_its_storage_is_refused(
    operations: bytes, said: str, archive: Made, tmp_path: Path
) -> None:
    assert said in refusal_of_pickle(archive, operations, tmp_path / "model.ckpt")


def test_excessively_shared_tensors_are_refused_at_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    numbers = torch.zeros(1 << 20)
    shared = {"a": [numbers.view(1 << 20) for _ in range(100)]}
    with pytest.raises(CheckpointContentError, match=r"has tensors of 419430400 bytes, of which"):
        SingleFileCheckpointIO().save_checkpoint(shared, path)
    torch.save(shared, path)
    assert "has tensors of 419430400 bytes, of which only 4194304 are stored" in refusal(path)
    tied = {"a": [numbers.view(1 << 20) for _ in range(24)]}
    SingleFileCheckpointIO().save_checkpoint(tied, path)
    loaded = SingleFileCheckpointIO().load_checkpoint(path)["a"]
    assert len({tensor.data_ptr() for tensor in loaded}) == 1


def test_sparse_tensors_with_indices_out_of_bounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    index, values = torch.tensor([[9, 9]]), torch.ones(2)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        wrong = torch.sparse_coo_tensor(index, values, (4,))
    torch.save({"a": wrong}, path)
    assert "is not a whole checkpoint" in refusal(path)


# ---------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"format_version":' + b"9" * 6000 + b"}",
        MANIFEST[:-1] + b',"epoch":NaN}',
        MANIFEST[:-1] + b',"global_step":1e999}',
        MANIFEST[:-1] + b',"global_step":"7"}',
        MANIFEST[:-1] + b',"run":7}',
        MANIFEST[:-1] + b',"format_version":1}',
        MANIFEST.replace(b"67108864", b"null"),
        b'{"contents":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
)
def test_a_manifest_of_other_kinds_of_values_is_refused(
    manifest: bytes, archive: Made, tmp_path: Path
) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(seal(archive.encode(), manifest))
    assert "its manifest cannot be read" in refusal(path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epoch": float("inf")}, "Infinity is no number"),
        ({"files": 3}, "AttributeError"),
        ({"files": {"state.ckpt": {"size": "1", "xxh3_128": ""}}}, "a file has the size '1'"),
        ({"files": {}}, "it does not name the file 'state.ckpt'"),
    ],
)
def test_a_directorys_manifest_of_other_kinds_of_values_is_refused(
    values: dict[str, Any], said: str, directory: Path
) -> None:
    sign_directory(directory, values, {})
    assert said in refusal(directory)


def test_a_directorys_manifest_that_is_nested_too_deeply_is_refused(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b'{"more":' + b"[" * 20_000 + b"]" * 20_000 + b"}")
    assert "it cannot be read (RecursionError" in refusal(directory)


# ---------------------------------------------------------------- layouts


def relayout(path: Path, change: Callable[[Any], Any]) -> str:
    layout = pickle.loads((path / ".metadata").read_bytes())
    change(layout)
    (path / ".metadata").write_bytes(pickle.dumps(layout))
    sign_directory(path, {}, {})
    return refusal(path)


def test_parts_that_name_the_same_bytes_are_refused(directory: Path) -> None:
    def share(layout: Any) -> None:
        first, second = layout.storage_data.values()
        second.offset = first.offset

    assert "'model.w' and 'model.w' share bytes of '__0_0.distcp'" in relayout(directory, share)


@pytest.mark.parametrize(
    ("offsets", "sizes", "said"),
    [
        ([5, 0], [10, 20], "has no chunk at (5, 0)"),
        ([10, 0], [11, 20], "which leads out of (20, 20)"),
        ([10, 0], [9, 20], "is a tensor of 400 elements, of which 380 are stored"),
        ([10, 0], [-10, -20], "has the size (-10, -20)"),
        ([10], [10], "has the size torch.Size([10])"),
    ],
)
def test_parts_that_make_no_whole_tensor_are_refused(
    offsets: list[int], sizes: list[int], said: str, directory: Path
) -> None:
    def change(layout: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        layout.state_dict_metadata["model.w"].chunks[1] = chunk

    assert said in relayout(directory, change)


def test_parts_that_share_elements_are_refused_since_others_are_nowhere(directory: Path) -> None:
    def overlap(layout: Any) -> None:
        chunk = layout.state_dict_metadata["model.w"].chunks[1]
        places = layout.storage_data
        index = next(key for key in places if key.offset == chunk.offsets)
        chunk.offsets = torch.Size([5, 0])
        places[type(index)("model.w", chunk.offsets)] = places.pop(index)

    assert "has chunks that share elements" in relayout(directory, overlap)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        # The memo's index is 2^32 - 1: an array of so many would be 32 GB.
        (b"\x80\x02Nr\xff\xff\xff\xff.", "it is a NoneType"),
        (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
            b"N}X\x06\x00\x00\x00harmedK\x01s\x86b.",
            "it asks for a state of a type",
        ),
        (b"\x80\x02ctorch\nSize\n](NNe\x85R.", "TypeError"),
        (
            b"\x80\x02}ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
            b")\x81}X\x03\x00\x00\x00fqn" + laughing(b"t", 60) + b"sbNs.",
            "its pickle repeats its keys",
        ),
    ],
)
def test_a_layout_that_would_grow_or_change_classes_is_refused(
    layout: bytes, said: str, directory: Path
) -> None:
    (directory / ".metadata").write_bytes(layout)
    sign_directory(directory, {}, {})
    assert said in refusal(directory)


def test_a_layout_names_only_files_that_were_verified(directory: Path) -> None:
    shutil.copy(directory / "__0_0.distcp", directory / "other")

    def move(layout: Any) -> None:
        for place in layout.storage_data.values():
            place.relative_path = "other"

    assert "its layout names 'other', which its manifest does not" in relayout(directory, move)


def test_a_part_of_another_kind_of_numbers_is_refused(directory: Path) -> None:
    def change(layout: Any) -> None:
        layout.state_dict_metadata["model.w"].properties.dtype = torch.int32

    assert "a chunk is of torch.float32" in relayout(directory, change)


# ---------------------------------------------------------------- what a Trainer saved


WHOLE: dict[str, Any] = {
    "state_dict": {},
    "progress": FitState().state_dict(),
    "optimizer_states": [],
    "lr_schedulers": [],
    "precision": {},
    "callbacks": {},
}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("progress", "x", "progress is 'x', expected a dict"),
        ("ranks", 5, "ranks is 5, expected a list or a dict"),
        ("optimizer_states", {}, "optimizer_states is a dict, expected a list"),
        ("precision", 3, "precision is 3, expected a dict"),
        ("callbacks", [], "callbacks is a list, expected a dict"),
        ("epoch", "q", "epoch is 'q', expected a number from 0 on"),
        ("format_version", "2", "format_version is '2', expected a number from 0 on"),
        (
            "progress",
            {**FitState().state_dict(), "batches": -3},
            "progress['batches'] is -3, expected a number from 0 on",
        ),
    ],
)
def test_an_entry_of_another_kind_is_refused_by_its_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(CheckpointCorruptError) as caught:
        trainer_format.check_trainer_checkpoint({**WHOLE, name: value}, "run.ckpt")
    assert str(caught.value) == f"'run.ckpt' is damaged: {said}"


def test_a_checkpoint_of_a_training_that_lacks_a_part_is_refused() -> None:
    lacking = {name: value for name, value in WHOLE.items() if name != "callbacks"}
    with pytest.raises(CheckpointCorruptError, match=r"is damaged: it lacks callbacks$"):
        trainer_format.check_trainer_checkpoint(lacking, "run.ckpt")
