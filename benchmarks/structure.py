"""Measures the shape of a package: rooms, floors, arrows, circles, and what is too long.

Run: python benchmarks/structure.py [packages/core/src/stratagem]

A room is a file or folder at the top of the package. An arrow is a pair of rooms of which one
imports the other, at import time or later, but not for types alone. The floors are the longest
chain of arrows, circles counted as one floor. Source lines are counted without docstrings,
comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CORE = Path(__file__).parents[1] / "packages" / "core" / "src" / "stratagem"
LONGEST = {"file": 450, "class": 400, "function": 60}
"""Lines, with docstrings and comments."""


@dataclass
class Shape:
    """What was counted.

    Attributes:
        files, folders: names at the top of the package; `__main__.py`, which nobody imports, is
            no room.
        arrows: pairs of rooms, the importing one first.
        circles: sets of rooms that import one another.
        floors: rooms in the longest chain of arrows.
        lines: of source, without docs.
        too_long: "kind lines place" for each file, class and function over its limit.
    """

    files: list[str]
    folders: list[str]
    arrows: set[tuple[str, str]]
    circles: list[set[str]] = field(default_factory=list)
    floors: int = 0
    lines: int = 0
    too_long: list[tuple[str, int, str]] = field(default_factory=list)


def measure(package: Path) -> Shape:
    """Return the shape of the package in a folder."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    rooms = {path: _room(path.relative_to(package)) for path in sources}
    arrows = {
        (rooms[path], room)
        for path, tree in trees.items()
        for room in _imported_rooms(tree, package)
        if room != rooms[path]
    }
    shape = Shape(
        files=sorted(path.name for path in package.glob("*.py") if path.stem != "__main__"),
        folders=sorted(path.parent.name for path in package.glob("*/__init__.py")),
        arrows={(a, b) for a, b in arrows if a != "__init__"},
    )
    groups = _circles({*rooms.values()}, shape.arrows)
    shape.circles = [group for group in groups if len(group) > 1]
    shape.floors = _longest_chain(groups, shape.arrows)
    shape.lines = sum(_lines_of_source(sources[path], trees[path]) for path in sources)
    for path, tree in trees.items():
        shape.too_long += _too_long(tree, sources[path], path.relative_to(package))
    return shape


def _room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _imported_rooms(tree: ast.Module, package: Path) -> Iterator[str]:
    for node in _run_time_nodes(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            name, _, rest = module.partition(".")
            room = rest.partition(".")[0]
            if name == package.name and room and _is_room(package, room):
                yield room


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def _is_room(package: Path, name: str) -> bool:
    return (package / name).is_dir() or (package / f"{name}.py").is_file()


def _circles(rooms: set[str], arrows: set[tuple[str, str]]) -> list[set[str]]:
    """Return the rooms in groups: those that reach one another, and each of the others alone."""
    reach = {room: {b for a, b in arrows if a == room} for room in rooms}
    changed = True
    while changed:
        changed = False
        for room, reached in reach.items():
            more = set().union(*(reach[other] for other in reached)) - reached
            if more:
                reach[room] |= more
                changed = True
    groups: list[set[str]] = []
    for room in sorted(rooms):
        if not any(room in group for group in groups):
            groups.append({room} | {o for o in reach[room] if room in reach[o]})
    return groups


def _longest_chain(groups: list[set[str]], arrows: set[tuple[str, str]]) -> int:
    number = {room: index for index, group in enumerate(groups) for room in group}
    below = {
        index: {number[b] for a, b in arrows if number[a] == index != number[b]}
        for index in range(len(groups))
    }

    def depth(index: int) -> int:
        return 1 + max((depth(other) for other in below[index]), default=0)

    return max(depth(index) for index in below)


def _lines_of_source(text: str, tree: ast.Module) -> int:
    docs: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docs.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    code: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def _too_long(tree: ast.Module, text: str, path: Path) -> Iterator[tuple[str, int, str]]:
    lines = text.count("\n")
    if lines > LONGEST["file"]:
        yield "file", lines, str(path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST[kind]:
                yield kind, length, f"{path}:{node.lineno} {node.name}"


def main() -> None:
    """Print the shape."""
    parser = argparse.ArgumentParser(description="Measures the shape of a package.")
    parser.add_argument("package", nargs="?", type=Path, default=CORE)
    shape = measure(parser.parse_args().package.resolve())
    print(f"files at the top     {len(shape.files)}: {', '.join(shape.files)}")
    print(f"folders at the top   {len(shape.folders)}: {', '.join(shape.folders)}")
    print(f"arrows between rooms {len(shape.arrows)}")
    print(f"circles              {len(shape.circles)}: {[sorted(c) for c in shape.circles]}")
    print(f"floors               {shape.floors}")
    print(f"lines of source      {shape.lines}")
    print(f"too long             {len(shape.too_long)}")
    for kind, lines, place in sorted(shape.too_long):
        print(f"  {kind:8} {lines:4} {place}")


if __name__ == "__main__":
    main()
