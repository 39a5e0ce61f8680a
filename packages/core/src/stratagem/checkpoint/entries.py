"""The reader of an archive's entries, for checks and for loading.

A zip archive can be read in several ways: two records at its end may locate the list of entries,
and each entry is described once more before its contents. An archive of `torch.save` reads the same
in all of these ways, and other archives are rejected. The entries must follow one another from the
first byte to the list, each as the list describes it, and only the end of the archive may follow
the list. So no two entries share bytes, and all entries together are no larger than the file.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LISTED = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIPTORS = {16: struct.Struct("<4s3L"), 24: struct.Struct("<4sL2Q")}
# Placeholders for numbers that do not fit; these are in a 64-bit field elsewhere.
_WIDE_16, _WIDE = 0xFFFF, 0xFFFFFFFF
_STORED = 0
# The flags that torch.save sets: sizes follow the contents; the name is in UTF-8.
_SIZES_FOLLOW, _UTF_8 = 1 << 3, 1 << 11
_DIRECTORY = 0x10


class Refused(ValueError):
    """The file is not as `torch.save` writes it, or needs more memory than its size allows.

    Example:
        >>> from stratagem.checkpoint import Refused
        >>> issubclass(Refused, ValueError)
        True
    """


class Entry(NamedTuple):
    """The location of an entry's contents.

    Attributes:
        offset: the offset in the archive, in bytes.
        size: the size in bytes.
    """

    offset: int
    size: int


class _Listed(NamedTuple):
    """An entry as the list at the end has it."""

    name: bytes
    flags: int
    crc: int
    size: int
    begin: int


def read_entries(contents: memoryview, *, comment: int = 0) -> dict[str, Entry]:
    """Return the entries of an archive that `torch.save` wrote, by their names in its folder.

    Args:
        contents: the bytes of the whole archive.
        comment: the number of bytes after the archive's end record.

    Raises:
        Refused: `torch.save` does not write such an archive. The error says where it differs.
    """
    end = len(contents) - comment - _END.size
    if end < 0:
        raise Refused(f"it has {len(contents)} bytes")
    list_begin, list_end, count = _find_list(contents, end)
    entries: dict[str, Entry] = {}
    folder = ""
    at, begin = list_begin, 0
    for _ in range(count):
        listed, at = _read_listed(contents, at, list_end)
        try:
            name = listed.name.decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(f"its entry {listed.name!r} has a name that is no text") from None
        folder = folder or name.partition("/")[0] + "/"
        why = ""
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            why = "leads out of the archive"
        elif not name.startswith(folder):
            why = f"is not in a folder {folder!r}"
        elif name[len(folder) :] in entries:
            why = "is there twice"
        elif listed.begin != begin:
            why = f"begins at {listed.begin}, expected {begin}"
        if why:
            raise Refused(f"its entry {name!r} {why}")
        entry, begin = _read_local(contents, listed, list_begin, name)
        entries[name[len(folder) :]] = entry
    if at != list_end or begin != list_begin:
        raise Refused(
            f"its {count} entries end at {begin} and their list at {at}, expected {list_begin} and "
            f"{list_end}",
        )
    return entries


def _find_list(contents: memoryview, end: int) -> tuple[int, int, int]:
    """Return where the list of entries begins and ends, and how many it has."""
    mark, disk, list_disk, here, count, size, begin, _ = _END.unpack_from(contents, end)
    if mark != b"PK\x05\x06" or disk or list_disk or here != count:
        raise Refused("it does not end as an archive of one piece")
    list_end = end
    locator = end - _LOCATOR.size
    if locator >= _END_64.size and bytes(contents[locator : locator + 4]) == b"PK\x06\x07":
        list_end = locator - _END_64.size
        _, disk, place, disks = _LOCATOR.unpack_from(contents, locator)
        mark, length, _, _, *disks_64, here_64, count_64, size_64, begin_64 = _END_64.unpack_from(
            contents, list_end
        )
        said = (min(count_64, _WIDE_16), min(size_64, _WIDE), min(begin_64, _WIDE))
        if (
            (disk, place, disks) != (0, list_end, 1)
            or (mark, length, disks_64) != (b"PK\x06\x06", _END_64.size - 12, [0, 0])
            or here_64 != count_64
            or any(
                value not in (narrow, wide)
                for value, narrow, wide in zip(
                    (count, size, begin), said, (_WIDE_16, _WIDE, _WIDE), strict=True
                )
            )
        ):
            raise Refused("the two records at its end disagree on where its entries are")
        count, size, begin = count_64, size_64, begin_64
    if begin + size != list_end:
        raise Refused(f"its list of entries ends at {begin + size}, expected it at {list_end}")
    return begin, list_end, count


def _read_listed(contents: memoryview, at: int, list_end: int) -> tuple[_Listed, int]:
    """Return an entry of the list, and where the next one is."""
    if at + _LISTED.size > list_end:
        raise Refused("its list of entries is shorter than it says")
    numbers = _LISTED.unpack_from(contents, at)
    mark, _, _, flags, method, _, _, crc, packed, size = numbers[:10]
    name_size, extra_size, comment_size, disk, _, attributes, begin = numbers[10:]
    name_end = at + _LISTED.size + name_size
    next_at = name_end + extra_size
    if mark != b"PK\x01\x02" or next_at > list_end:
        raise Refused("its list of entries is damaged")
    name = bytes(contents[at + _LISTED.size : name_end])
    if _WIDE in (packed, size, begin):
        wide = _wide_numbers(contents[name_end:next_at])
        try:
            size, packed, begin = (
                wide.pop(0) if number == _WIDE else number for number in (size, packed, begin)
            )
        except IndexError:
            raise Refused(f"its entry {name!r} lacks its size") from None
    if method != _STORED or packed != size:
        text = name.decode(errors="replace")
        raise Refused(f"its entry {text!r} is compressed, from {size} bytes to {packed}")
    if flags & ~(_SIZES_FOLLOW | _UTF_8) or comment_size or disk:
        raise Refused(f"its entry {name!r} has the flags {flags:#x}")
    if attributes & _DIRECTORY:
        # torch.load would leave the memory of the entry's tensor uninitialized.
        raise Refused(f"its entry {name!r} is marked as a directory")
    return _Listed(name, flags, crc, size, begin), next_at


def _wide_numbers(extra: memoryview) -> list[int]:
    """Return the numbers of 64 bits in the further fields of an entry."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + size]
            return [number for (number,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8])]
        at += 4 + size
    return []


def _read_local(
    contents: memoryview, listed: _Listed, list_begin: int, name: str
) -> tuple[Entry, int]:
    """Return where an entry's contents are, and where the next entry begins.

    Raises:
        Refused: the description before or after the contents differs from the list.
    """
    contents = contents[:list_begin]
    if listed.begin + _LOCAL.size > list_begin:
        raise Refused(f"its entry {name!r} begins at {listed.begin}, after the last one")
    mark, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _LOCAL.unpack_from(
        contents, listed.begin
    )
    name_begin = listed.begin + _LOCAL.size
    offset = name_begin + name_size + extra_size
    after = offset + listed.size
    follows = bool(flags & _SIZES_FOLLOW)
    possible = {min(listed.size, _WIDE), 0 if follows else listed.size}
    if (
        (mark, flags, method) != (b"PK\x03\x04", listed.flags, _STORED)
        or contents[name_begin : name_begin + name_size] != listed.name
        or not {packed, size} <= possible
        or (crc != listed.crc and not (follows and crc == 0))
        or after > list_begin
    ):
        raise Refused(f"its entry {name!r} is described in two ways")
    if follows:
        for length, descriptor in _DESCRIPTORS.items():
            if after + length <= list_begin and descriptor.unpack_from(contents, after) == (
                *(b"PK\x07\x08", listed.crc, listed.size, listed.size),
            ):
                return Entry(offset, listed.size), after + length
        raise Refused(f"its entry {name!r} has another size than it says")
    return Entry(offset, listed.size), after
