"""Checkpoints made to harm: each loads what was saved or is refused, in little memory and time.

Hypothesis takes a checkpoint apart, changes some of it, and puts it together with checksums that
fit, as one would who means harm. A process of its own opens it (`scripts/fuzz_worker.py`).

500 cases run with all tests, always the same. `STRATAGEM_FUZZ_CASES=10000` runs so many others
(the session `fuzz`); what fails is printed as it has to be given to `@example`.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import select
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hostile_archives import (
    END_64_FIELDS,
    END_FIELDS,
    LISTED_FIELDS,
    LOCAL_FIELDS,
    LOCATOR_FIELDS,
    Made,
    Member,
    parse,
    seal,
    sign_directory,
)
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from stratagem import Lite
from stratagem.checkpoint import Shards, SingleFileCheckpointIO

CASES = int(os.environ.get("STRATAGEM_FUZZ_CASES", "0"))
# Of the address space, beside twice the file's size: what a first load takes for itself.
CONSTANT = 64 << 20
SECONDS = 10.0

MANIFEST = b'{"format_version":2,"piece_size":67108864,"stratagem":"0","torch":"2","contents":[]}'

Build = Callable[[Path], bool]
"""Makes the checkpoint at a path; returns whether it must be the original if it loads."""


# ---------------------------------------------------------------- what is saved


def contents() -> dict[str, Any]:
    torch.manual_seed(0)
    weights = torch.arange(600.0).reshape(20, 30)
    return {
        "number": 7,
        "weights": weights,
        "view": weights[3:5, ::2],
        "names": ["a", "b", {"c": (1, 2.5, None, True)}],
        "bytes": b"\x00\xff",
        "set": {1, 2, 3},
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(4).to_sparse(),
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "big": 2**70,
        "state": torch.nn.Linear(2, 2).state_dict(),
    }


class Bases:
    """One whole checkpoint of each kind, and what opens changed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file, self.plain = folder / "file.ckpt", folder / "plain.ckpt"
        SingleFileCheckpointIO().save_checkpoint(contents(), self.file)
        torch.save(contents(), self.plain)
        self.directory = folder / "directory"
        lite = Lite(accelerator="cpu", plugins="directory")
        lite.launch()
        values = torch.arange(400.0)
        chunks = [((0, 0), values[:200].view(10, 20)), ((10, 0), values[200:].view(10, 20))]
        sharded = {"a": Shards((20, 20), torch.float32, chunks), "b": torch.ones(9), "c": 3}
        lite.save(self.directory, {"model": sharded, "rest": contents()})
        self.archive = parse(self.plain)
        self.pickle = self.archive.members[0].data
        self.operations = split(self.pickle)
        self.layout = (self.directory / ".metadata").read_bytes()
        self.layout_operations = split(self.layout)
        self.worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "scripts" / "fuzz_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The heap of a thread takes 64 MB of the address space.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        )
        self.number = 0

    def open(self, path: Path) -> dict[str, Any]:
        """Return what the worker tells of a checkpoint."""
        stdin, stdout = self.worker.stdin, self.worker.stdout
        assert stdin is not None
        assert stdout is not None
        base = self.directory if path.is_dir() else self.file
        stdin.write(json.dumps([str(path), str(base)]) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], 120)
        assert ready, "the worker hangs"
        told: dict[str, Any] = json.loads(stdout.readline())
        return told


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    made = Bases(tmp_path_factory.mktemp("bases"))
    yield made
    assert made.worker.stdin is not None
    made.worker.stdin.close()
    assert made.worker.wait(60) == 0


def split(data: bytes) -> list[bytes]:
    """Return the operations of a pickle."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]


def check(bases: Bases, build: Build) -> dict[str, Any]:
    """Make a checkpoint, open it, and hold what the module's docstring says against it."""
    bases.number += 1
    path = bases.folder / f"case-{bases.number}"
    size = 0
    try:
        is_original = build(path)
        told = bases.open(path)
        if path.is_dir():
            size = sum(file.lstat().st_size for file in path.iterdir())
        elif path.is_file():
            size = path.stat().st_size
        hold(told, is_original, size)
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return told


def hold(told: dict[str, Any], is_original: bool, size: int) -> None:
    """Hold what the module's docstring says against what the worker tells."""
    said = json.dumps(told, indent=1)
    assert "ended" not in told, said
    for how in ("unchecked", "verified", "loaded"):
        assert told[how] == "" or told[how].startswith("refused"), said
    assert told["grown"] <= 2 * size + CONSTANT, said
    assert told["seconds"] <= SECONDS, said
    assert (told["verified"] == "") == (told["loaded"] == ""), said
    assert "as_torch" not in told, said
    assert told.get("is_original", True) or not is_original, said


# ---------------------------------------------------------------- what is changed

numbers = st.one_of(
    st.sampled_from([0, 1, 2, 8, 64, 0xFFFF, 1 << 20, 1 << 31, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1]),
    st.integers(0, 5000),
)
garbage = st.binary(max_size=80)
widths = {
    **dict.fromkeys(
        ["made", "needed", "flags", "method", "time", "date", "name_size", "extra_size"], 2
    ),
    **dict.fromkeys(["comment_size", "disk", "internal", "here", "count", "disks"], 2),
}


def changed(fields: list[str], wide: bool = False) -> st.SearchStrategy[dict[str, int]]:
    """Return strategies for numbers in some of a record's fields, each as wide as its field."""

    def fit(values: dict[str, int]) -> dict[str, int]:
        return {
            name: value
            & ((1 << 64) - 1 if wide else 0xFFFF if widths.get(name) == 2 else 0xFFFFFFFF)
            for name, value in values.items()
        }

    return st.dictionaries(st.sampled_from(fields[1:]), numbers, max_size=2).map(fit)


def fit_end_64(values: dict[str, int]) -> dict[str, int]:
    masks = {"made": 0xFFFF, "needed": 0xFFFF, "disk": 0xFFFFFFFF, "list_disk": 0xFFFFFFFF}
    return {name: value & masks.get(name, (1 << 64) - 1) for name, value in values.items()}


def fit_locator(values: dict[str, int]) -> dict[str, int]:
    return {k: v & ((1 << 64) - 1 if k == "place" else 0xFFFFFFFF) for k, v in values.items()}


def fit_end(values: dict[str, int]) -> dict[str, int]:
    return {k: v & (0xFFFFFFFF if k in ("size", "begin") else 0xFFFF) for k, v in values.items()}


@st.composite
def archives(draw: st.DrawFn, original: Made) -> bytes:
    """Return an archive whose records, order and bytes are changed, but not what is in it."""
    members = [replace(member) for member in original.members]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(members) - 1))
        match draw(st.sampled_from(["local", "listed", "descriptor", "before", "hide", "order"])):
            case "local":
                members[at].local = draw(changed(LOCAL_FIELDS))
            case "listed":
                members[at].listed = draw(changed(LISTED_FIELDS))
            case "descriptor":
                members[at].descriptor = draw(changed(["", "crc", "packed", "size"]))
            case "before":
                members[at].before = draw(garbage)
            case "hide":
                members[at].is_listed = False
            case _:
                other = draw(st.integers(0, len(members) - 1))
                members[at], members[other] = members[other], members[at]
    made = Made(members, wide=draw(st.booleans()))
    match draw(st.sampled_from(["nothing", "nothing", "end", "end_64", "locator", "between"])):
        case "end":
            made.end = fit_end(draw(st.dictionaries(st.sampled_from(END_FIELDS[1:]), numbers)))
        case "end_64":
            fields = st.sampled_from(END_64_FIELDS[1:])
            made.end_64 = fit_end_64(draw(st.dictionaries(fields, numbers, max_size=2)))
        case "locator":
            fields = st.sampled_from(LOCATOR_FIELDS[1:])
            made.locator = fit_locator(draw(st.dictionaries(fields, numbers, max_size=2)))
        case "between":
            made.between = draw(garbage)
    data = made.encode()
    match draw(st.sampled_from(["nothing", "nothing", "nothing", "before", "cut", "twice", "two"])):
        case "before":
            data = draw(garbage) + data
        case "cut":
            data = data[: draw(st.integers(0, len(data)))]
        case "twice":
            data = data + data
        case "two":
            data = two_lists(original, draw(st.booleans()))
    return data


def two_lists(original: Made, nearer: bool) -> bytes:
    """Return an archive with two lists: the locator leads to one, the other is where it belongs."""
    bomb = [replace(member) for member in original.members]
    bomb[0] = Member(bomb[0].name, pickle.dumps("A" * 100, 2))
    first, second = (original.members, bomb) if nearer else (bomb, original.members)
    one = Made(first).encode()
    place = len(one) - 98
    shift = Made([replace(second[0], before=one), *second[1:]])
    shift.locator = {"place": place}
    return shift.encode()


def long(number: int) -> bytes:
    data = pickle.encode_long(number)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    name = f"ctorch\n{kind}\n".encode()
    return b"(" + text("storage") + name + text(key) + text("cpu") + long(count) + b"tQ"


def tensor(key: str, count: int, offset: int, size: list[int], stride: list[int]) -> bytes:
    """Return the operations that make a tensor."""
    shapes = b"".join(b"(" + b"".join(map(long, shape)) + b"t" for shape in (size, stride))
    return b"".join(
        [
            *(b"ctorch._utils\n_rebuild_tensor_v2\n(", storage(key, count), long(offset), shapes),
            b"\x89ccollections\nOrderedDict\n)RtR",
        ]
    )


def laughing(kind: bytes, levels: int) -> bytes:
    """Return the operations of lists or tuples that each hold the one before twice."""
    step = b"h\x01h\x01\x86q\x01" if kind == b"t" else b"]q\x02(h\x01h\x01eq\x01"
    return b"(" + text("ha") + b"q\x01" + step * levels + b"t"


sizes = st.lists(st.sampled_from([0, 1, 2, 30, 600, 1 << 20, 1 << 33, 1 << 62, -1]), max_size=3)
hostile = st.one_of(
    st.builds(
        tensor,
        st.sampled_from(["0", "1", "9", "../x"]),
        st.sampled_from([600, 1, 0, 1 << 40, -1]),
        st.sampled_from([0, 5, -1, 1 << 40, 1 << 62]),
        sizes,
        sizes,
    ),
    st.builds(
        lambda name, number: b"c" + name + long(number) + b"\x85R",
        st.sampled_from(
            [
                b"__builtin__\nbytearray\n",
                b"__builtin__\nset\n",
                b"torch\nFloatTensor\n",
                b"torch\nTensor\n",
                b"torch\nSize\n",
                b"torch\nempty\n",
                b"collections\nCounter\n",
                b"os\nsystem\n",
            ]
        ),
        st.sampled_from([0, 10, 1 << 31, 1 << 45]),
    ),
    st.builds(
        lambda name, count, times: (
            (
                b"]q\x01("
                + b"K\x07" * count
                + b"e0c"
                + name
                + b"q\x020]("
                + b"h\x02h\x01\x85R" * times
            )
            + b"e"
        ),
        st.sampled_from([b"__builtin__\nset\n", b"torch\nSize\n", b"collections\nOrderedDict\n"]),
        st.sampled_from([1, 20_000]),
        st.sampled_from([1, 20_000]),
    ),
    st.builds(
        lambda codec, count, times: (
            (text("é" * count) + b"q\x01c_codecs\nencode\nq\x02](")
            + (b"h\x02h\x01" + text(codec) + b"\x86R") * times
            + b"e"
        ),
        st.sampled_from(["latin1", "idna", "unicode_escape", "punycode", "zlib_codec"]),
        st.sampled_from([1, 20_000]),
        st.sampled_from([1, 3000]),
    ),
    st.builds(laughing, st.sampled_from([b"t", b"l"]), st.sampled_from([2, 20, 60, 3000])),
    st.builds(
        lambda levels: b"}q\x05" + laughing(b"t", levels) + b"K\x01s", st.sampled_from([3, 60])
    ),
    st.builds(
        lambda levels: b"c__builtin__\nset\n](" + laughing(b"t", levels) + b"e\x85R",
        st.sampled_from([3, 60]),
    ),
    st.builds(lambda index: b"Nr" + struct.pack("<I", index), st.sampled_from([9, 0xFFFFFFFF])),
    st.builds(
        lambda length: b"X" + struct.pack("<I", length) + b"a",
        numbers.map(lambda n: n & 0xFFFFFFFF),
    ),
    st.builds(lambda levels: b"]" * levels + b"a" * (levels - 1), st.sampled_from([5, 300, 5000])),
    st.just(b"]q\x01h\x01a"),
    st.just(b"}q\x01K\x01h\x01s"),
    st.just(b"ctorch\nTensor\nN}X\x01\x00\x00\x00aNs\x86b"),
    st.just(b"ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__Nsb"),
    st.just(b"ccollections\nOrderedDict\n)RX\x01\x00\x00\x00ab"),
    st.just(b"ctorch._utils\n_rebuild_nested_tensor\nNNNN\x86\x86\x86R"),
    garbage,
)


@st.composite
def pickles(draw: st.DrawFn, operations: list[bytes]) -> bytes:
    """Return a pickle of operations that are dropped, repeated, moved, or hostile."""
    changed_operations = list(operations)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed_operations) - 1))
        match draw(st.sampled_from(["value", "value", "drop", "repeat", "move", "put", "byte"])):
            case "value":
                # As the value of a key of the dict that is being filled.
                place = next((i for i, o in enumerate(operations) if o[:1] == b"(" and i), 1)
                changed_operations[place + 1 : place + 1] = [text("x"), draw(hostile)]
            case "drop":
                del changed_operations[at]
            case "repeat":
                changed_operations[at:at] = [changed_operations[at]] * draw(st.integers(1, 50))
            case "move":
                operation = changed_operations.pop(at)
                changed_operations.insert(draw(st.integers(0, len(changed_operations))), operation)
            case "put":
                changed_operations.insert(at, draw(hostile))
            case _:
                altered = bytearray(changed_operations[at])
                altered[draw(st.integers(0, len(altered) - 1))] = draw(st.integers(0, 255))
                changed_operations[at] = bytes(altered)
    return b"".join(changed_operations)


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just(["x"]),
    st.sampled_from([10**5000, 10**30, float("nan"), float("inf"), 1.5, -1]).map(
        lambda value: value if not isinstance(value, int) or value < 10**100 else 10**300
    ),
)
field_names = st.sampled_from(
    [
        "format_version",
        "piece_size",
        "stratagem",
        "torch",
        "strategy",
        "world_size",
        "epoch",
        "global_step",
        "run",
        "contents",
        "files",
        "else",
    ]
)
manifests = st.one_of(
    st.dictionaries(field_names, json_values, max_size=3).map(
        lambda values: json.dumps({**json.loads(MANIFEST), **values}).encode()
    ),
    st.sampled_from(
        [
            b'{"contents":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            b'{"format_version":' + b"9" * 6000 + b"}",
            MANIFEST[:-1] + b',"epoch":NaN}',
            MANIFEST[:-1] + b',"epoch":1e999}',
            MANIFEST[:-1] + b',"format_version":2}',
            MANIFEST[:-1] + b',"x":' + b"[" * 900 + b"]" * 900 + b"}",
            b"{}",
            b'{"a":"PK\\u0005\\u0006"}',
            b'{"a":"PK\x05\x06' + bytes(18) + b'"}',
        ]
    ),
)


# ---------------------------------------------------------------- the kinds of cases


@st.composite
def files(draw: st.DrawFn, bases: Bases) -> Build:
    """Return what makes a single file."""
    is_original = True
    archive = Made([replace(member) for member in bases.archive.members])
    kind = draw(st.sampled_from(["archive", "pickle", "manifest", "storage", "flip", "place"]))
    manifest = draw(manifests) if kind == "manifest" else MANIFEST
    data = archive.encode()
    match kind:
        case "archive":
            data = draw(archives(bases.archive))
        case "pickle":
            archive.members[0].data = draw(pickles(bases.operations))
            data, is_original = archive.encode(), False
        case "storage":
            at = draw(st.integers(1, len(archive.members) - 1))
            archive.members[at].data = draw(
                st.one_of(garbage, st.just(b"big"), st.just(archive.members[at].data[:-1]))
            )
            data, is_original = archive.encode(), False
        case "flip":
            flipped = bytearray(data)
            flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
            data, is_original = bytes(flipped), False
        case "place":
            place = draw(st.sampled_from(sorted(PLACES)))
            return lambda path: PLACES[place](path) or True
    if kind == "manifest" or draw(st.booleans()):
        data = seal(data, manifest)

    def build(path: Path) -> bool:
        path.write_bytes(data)
        return is_original

    return build


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def a_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "socket": a_socket,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "missing": lambda path: None,
    "huge": a_terabyte,
}


def change_layout(metadata: Any, kind: str, number: int, at: int) -> None:
    """Let a layout say something else."""
    places = list(metadata.storage_data.values())
    place = places[at % len(places)]
    entries = list(metadata.state_dict_metadata.values())
    entry = entries[at % len(entries)]
    chunk = entry.chunks[at % len(entry.chunks)]
    match kind:
        case "offset" | "length":
            setattr(place, kind, number)
        case "negative":
            place.offset = -number
        case "same":
            place.offset, place.length = places[0].offset, places[0].length
        case "more":
            for row in range(20):
                part = type(chunk)(torch.Size([row, 0]), torch.Size([1, 20]))
                metadata.state_dict_metadata["model.a"].chunks.append(part)
        case "text":
            place.offset = "0"
        case "path":
            place.relative_path = ["../x", "/dev/zero", "state.ckpt", "", 3, "a\0b"][at % 6]
        case "size":
            entry.size = torch.Size([min(number, 1 << 62)] * 2)
        case "rank":
            entry.size = torch.Size([1] * 9)
        case "chunk":
            chunk.sizes = torch.Size([min(number, 1 << 62), 1])
        case "holes":
            chunk.offsets = torch.Size([min(number, 1 << 62), -1])
        case "dtype":
            entry.properties.dtype = [torch.float64, torch.int8, None][at % 3]
        case "planner":
            key = next(iter(metadata.state_dict_metadata))
            metadata.planner_data[key] = [("step", number), (), 3, ("c",) * 5000, ([],)][at % 5]
        case _:
            metadata.storage_data = [None, {}, {1: 2}][at % 3]


LAYOUT_CHANGES = [
    "offset",
    "length",
    "negative",
    "same",
    "more",
    "text",
    "path",
    "size",
    "rank",
    "chunk",
    "holes",
    "dtype",
    "planner",
    "data",
]
EMPTY = {"size": 0, "xxh3_128": xxhash.xxh3_128_hexdigest(b"")}
MEMBERS = st.sampled_from(["manifest.json", "state.ckpt", ".metadata", "__0_0.distcp"])


@st.composite
def directories(draw: st.DrawFn, bases: Bases) -> Build:
    """Return what makes a directory."""
    steps: list[Callable[[Path], Any]] = []
    is_original = True
    signed: dict[str, Any] = {}
    named: dict[str, Any] = {}
    kind = draw(
        st.sampled_from(["layout", "layout", "pickle", "member", "signed", "named", "part", "flip"])
    )
    match kind:
        case "layout":
            changes = draw(
                st.lists(
                    st.tuples(st.sampled_from(LAYOUT_CHANGES), numbers, st.integers(0, 5)),
                    min_size=1,
                    max_size=2,
                    unique_by=lambda change: change[0],
                )
            )
            metadata = pickle.loads(bases.layout)
            for change in sorted(changes, key=lambda change: change[0] == "data")[:2]:
                change_layout(metadata, *change)
            layout = pickle.dumps(metadata)
            steps.append(lambda path: (path / ".metadata").write_bytes(layout))
            # Paths and places of equal parts may be exchanged, and say so.
            is_original = False
        case "pickle":
            operations = draw(pickles(bases.layout_operations))
            steps.append(lambda path: (path / ".metadata").write_bytes(operations))
            is_original = False
        case "member":
            member, place = draw(MEMBERS), draw(st.sampled_from(sorted(PLACES)))

            def put(path: Path) -> None:
                (path / member).unlink()
                # A path to a socket is short.
                PLACES["fifo" if place in ("socket", "huge") else place](path / member)

            steps.append(put)
            if draw(st.booleans()):
                named = {member: EMPTY}
            # Without its manifest it is one of plain DCP.
            is_original = (member, place) != ("manifest.json", "missing")
        case "signed":
            signed = draw(st.dictionaries(field_names, json_values, min_size=1, max_size=3))
        case "named":
            names = st.sampled_from(["state.ckpt", "../x", "", "a/b", "manifest.json", "\0", "x"])
            entry = st.one_of(
                json_values,
                st.fixed_dictionaries({"size": json_values, "xxh3_128": json_values}),
            )
            named = draw(st.dictionaries(names, entry, min_size=1, max_size=2))
        case "part":
            file = draw(st.sampled_from(["state.ckpt", "__0_0.distcp"]))
            at, byte = draw(st.floats(0, 0.999)), draw(st.integers(0, 255))

            def overwrite(path: Path) -> None:
                contents = bytearray((path / file).read_bytes())
                contents[int(at * len(contents))] = byte
                (path / file).write_bytes(contents)

            steps.append(overwrite)
            is_original = False
        case _:
            member, at, bit = draw(MEMBERS), draw(st.floats(0, 0.999)), draw(st.integers(0, 7))

            def flip(path: Path) -> None:
                contents = bytearray((path / member).read_bytes())
                contents[int(at * len(contents))] ^= 1 << bit
                (path / member).write_bytes(contents)

            steps.append(flip)
    is_signed = kind not in ("flip",) and draw(st.integers(0, 4)) > 0
    is_plain = kind in ("layout", "pickle") and draw(st.booleans())

    def build(path: Path) -> bool:
        shutil.copytree(bases.directory, path)
        for step in steps:
            step(path)
        manifest = path / "manifest.json"
        if (
            is_signed
            and manifest.is_file()
            and not manifest.is_symlink()
            and manifest.stat().st_size
        ):
            sign_directory(path, signed, named)
        if is_plain:
            manifest.unlink()
            (path / "state.ckpt").unlink()
        return is_original and not is_plain

    return build


@pytest.mark.slow
def test_hostile_checkpoint_loads_the_saved_values_or_is_refused(bases: Bases) -> None:
    @settings(
        max_examples=CASES or 500,
        derandomize=not CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        report_multiple_bugs=False,
        phases=[Phase.generate] if CASES else [Phase.generate, Phase.shrink],
    )
    @given(st.one_of(files(bases), files(bases), directories(bases)))
    def run(build: Build) -> None:
        check(bases, build)

    run()
