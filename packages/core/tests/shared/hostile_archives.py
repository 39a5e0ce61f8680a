"""Zip archives byte by byte, as `torch.save` lays them out, and with anything in them changed."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

LOCAL = struct.Struct("<4s5H3L2H")
LISTED = struct.Struct("<4s6H3L5H2L")
LOCAL_FIELDS = [
    "mark",
    "needed",
    "flags",
    "method",
    "time",
    "date",
    "crc",
    "packed",
    "size",
    "name_size",
    "extra_size",
]
LISTED_FIELDS = [
    "mark",
    "made",
    "needed",
    "flags",
    "method",
    "time",
    "date",
    "crc",
    "packed",
    "size",
    "name_size",
    "extra_size",
    "comment_size",
    "disk",
    "internal",
    "external",
    "begin",
]
END_64_FIELDS = [
    "mark",
    "length",
    "made",
    "needed",
    "disk",
    "list_disk",
    "here",
    "count",
    "size",
    "begin",
]
LOCATOR_FIELDS = ["mark", "disk", "place", "disks"]
END_FIELDS = ["mark", "disk", "list_disk", "here", "count", "size", "begin", "comment_size"]


@dataclass
class Member:
    """An entry.

    Attributes:
        name, data: of it.
        local, listed, descriptor: numbers that its records have in place of the right ones.
        before: bytes that stand before it.
        is_listed: whether the list of entries has it.
    """

    name: str
    data: bytes
    local: dict[str, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    descriptor: dict[str, int] = field(default_factory=dict)
    before: bytes = b""
    is_listed: bool = True


@dataclass
class Made:
    """An archive.

    Attributes:
        members: in order.
        end, end_64, locator: numbers in place of the right ones.
        between: bytes between the list and the end records.
        wide: whether the 64-bit records are there, as torch.save writes them.
        comment: of the archive.
    """

    members: list[Member]
    end: dict[str, int] = field(default_factory=dict)
    end_64: dict[str, int] = field(default_factory=dict)
    locator: dict[str, int] = field(default_factory=dict)
    between: bytes = b""
    wide: bool = True
    comment: bytes = b""

    def encode(self) -> bytes:
        out = bytearray()
        listed = bytearray()
        count = 0
        for member in self.members:
            out += member.before
            begin = len(out)
            record = _record(member)
            name = member.name.encode()
            padding = -(begin + LOCAL.size + len(name) + 4) % 64
            local = {
                **record,
                **{"crc": 0, "packed": 0, "size": 0, "extra_size": padding + 4},
                **member.local,
            }
            out += LOCAL.pack(b"PK\x03\x04", *(local[key] for key in LOCAL_FIELDS[1:]))
            out += name + b"FB" + struct.pack("<H", padding) + b"Z" * padding + member.data
            if record["flags"] & 8:
                sizes = {**record, **member.descriptor}
                out += struct.pack(
                    "<4s3L", b"PK\x07\x08", *map(sizes.get, ("crc", "packed", "size"))
                )
            if member.is_listed:
                count += 1
                values = {**record, "begin": begin, **member.listed}
                listed += LISTED.pack(b"PK\x01\x02", *(values[key] for key in LISTED_FIELDS[1:]))
                listed += name
        begin = len(out)
        out += listed + self.between
        return bytes(out) + self._ending(begin, len(listed), count, len(out))

    def _ending(self, begin: int, size: int, count: int, at: int) -> bytes:
        numbers = {"here": count, "count": count, "size": size, "begin": begin}
        zeros = dict.fromkeys(("disk", "list_disk"), 0)
        out = b""
        if self.wide:
            end_64 = {**numbers, **zeros, "length": 44, "made": 798, "needed": 45, **self.end_64}
            out += struct.pack(
                "<4sQ2H2L4Q", b"PK\x06\x06", *(end_64[key] for key in END_64_FIELDS[1:])
            )
            locator = {"disk": 0, "place": at, "disks": 1, **self.locator}
            out += struct.pack("<4sLQL", b"PK\x06\x07", *(locator[k] for k in LOCATOR_FIELDS[1:]))
        end = {**numbers, **zeros, "comment_size": len(self.comment), **self.end}
        out += struct.pack("<4s4H2LH", b"PK\x05\x06", *(end[key] for key in END_FIELDS[1:]))
        return out + self.comment


def _record(member: Member) -> dict[str, int]:
    zeros = dict.fromkeys(LISTED_FIELDS, 0)
    return {
        **zeros,
        "flags": 0x808 if member.data else 0x800,
        "crc": zlib.crc32(member.data),
        "packed": len(member.data),
        "size": len(member.data),
        "name_size": len(member.name.encode()),
    }


def parse(path: Path) -> Made:
    """Return an archive that `torch.save` wrote, without its comment."""
    with zipfile.ZipFile(path) as archive:
        return Made([Member(e.orig_filename, archive.read(e)) for e in archive.infolist()])


def checksum_of(data: bytes) -> str:
    """Return the checksum of a file of one piece, by its definition."""
    return xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(data))


def seal(archive: bytes, manifest: bytes) -> bytes:
    """Return an archive without a comment with our manifest and a checksum that fits."""
    before = b"stratagem checkpoint\n" + manifest + b"\nxxh3_128 "
    length = min(len(before) + 32, 0xFFFF)
    contents = archive[:-2] + length.to_bytes(2, "little") + before
    return contents + checksum_of(contents).encode()


def sign_directory(path: Path, changes: dict[str, Any], files: dict[str, Any]) -> None:
    """Write the manifest of a directory anew, so that all of its checksums fit."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["xxh3_128"]
    for name, entry in manifest["files"].items():
        member = path / name
        if member.is_file() and not member.is_symlink():
            contents = member.read_bytes()
            entry.update(size=len(contents), xxh3_128=checksum_of(contents))
    manifest["files"].update(files)
    manifest.update(changes)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, indent=1).encode())
    (path / "manifest.json").write_text(json.dumps({**manifest, "xxh3_128": digest}, indent=1))
