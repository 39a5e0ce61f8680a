"""Measures the shape of a package, and words of docstrings, comments and names of tests.

Run: python benchmarks/structure.py [packages/core/src/stratagem]

A room is a file or folder at the top of the package. An arrow is a pair of rooms of which one
imports the other, at import time or later, but not for types alone. The floors are the longest
chain of arrows, circles counted as one floor. Lines of code are counted without docstrings,
comments and blank lines. Filler is the share of public docstrings whose first paragraph has a word
that stands in the place of a noun, such as "what" or "those". The same is measured of comments in
packages/*/src, line by line, of the names of all test functions, and of all docstrings in
packages/*/src with a section such as "Args:", public or private, from the first word to the last.
--texts lists these docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "packages" / "core" / "src" / "stratagem"
RUNS = {
    "import of Lite": "from stratagem import Lite",
    "fit of a Trainer": """
import os, tempfile, torch
from stratagem import Module, Trainer

class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

os.chdir(tempfile.mkdtemp())
Trainer(accelerator="cpu", max_steps=2).fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 2)))
""",
}
"""Scripts whose imports of core are counted."""
_FOLDERS_OF_TESTS = ("tests", "packages/*/tests", "examples/**/tests")
_FILLER = re.compile(
    r"\b(what|whom|whose|that of|those|so many|in the place|there (is|are)|it is|they are|by now|"
    r"thing|one of|of it|none)\b",
    re.IGNORECASE,
)
_WORDS = (
    "what|whom|whose|who|that of|those|so many|there is|there are|it is|they are|by now|thing|"
    "one of|of it|nobody|everybody"
)
_FILLER_OF_COMMENTS = re.compile(rf"\b((?i:{_WORDS})|none)\b")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_QUOTED = re.compile(r"`[^`]*`|^ +(?:>>>|\.\.\.) .*|^ {4}[\w*, ]+:", re.MULTILINE)
_FILLER_OF_NAMES = re.compile(rf"(?:^|_)({_WORDS.replace(' ', '_')}|none)(?=_|$)")


@dataclass
class Shape:
    """What was counted.

    Attributes:
        files, folders: names at the top of the package; `__main__.py`, which nobody imports, is
            no room.
        arrows: pairs of rooms, the importing one first.
        circles: sets of rooms that import one another.
        floors: rooms in the longest chain of arrows.
        lines: of code.
        flat: the number of files in each folder, without `__init__.py`, the largest first.
        docstrings: the number of public ones.
        filler: those of them with a filler.
    """

    files: list[str]
    folders: list[str]
    arrows: set[tuple[str, str]]
    circles: list[set[str]] = field(default_factory=list)
    floors: int = 0
    lines: int = 0
    flat: dict[str, int] = field(default_factory=dict)
    docstrings: int = 0
    filler: int = 0


@dataclass
class Texts:
    """Comments, docstrings, or names of tests.

    Attributes:
        count: the number of all.
        filler: the texts with a filler, each after its file.
    """

    count: int = 0
    filler: list[str] = field(default_factory=list)

    def add(self, path: Path, text: str, filler: re.Pattern[str]) -> None:
        """Count a text of a file."""
        self.count += 1
        if filler.search(text):
            self.filler.append(f"{path}: {text}")

    @property
    def share(self) -> float:
        """The share of texts with a filler."""
        return len(self.filler) / self.count


def measure_comments(root: Path) -> Texts:
    """Count the lines of comments in the sources of all packages of a repository."""
    texts = Texts()
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                texts.add(path.relative_to(root), token.string, _FILLER_OF_COMMENTS)
    return texts


def measure_args(root: Path) -> Texts:
    """Count the docstrings with a section of Args, Attributes, Raises, Returns or Yields.

    Code in backticks, code of examples, and names of arguments are left out.
    """
    texts = Texts()
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node) or ""
                if _SECTION.search(text):
                    place = path.relative_to(root).with_name(f"{path.name}:{node.lineno}")
                    texts.add(place, _QUOTED.sub("``", text), _FILLER_OF_COMMENTS)
    return texts


def measure_test_names(root: Path) -> Texts:
    """Count the names of test functions in a repository; a name may stand in several files."""
    texts = Texts()
    for folder in _FOLDERS_OF_TESTS:
        for path in sorted(root.glob(f"{folder}/**/*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    texts.add(path.relative_to(root), node.name, _FILLER_OF_NAMES)
    return texts


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
    shape.lines = sum(lines_of_code(sources[path], trees[path]) for path in sources)
    summaries = [text for tree in trees.values() for text in _summaries(tree)]
    shape.docstrings = len(summaries)
    shape.filler = sum(bool(_FILLER.search(text)) for text in summaries)
    folders = Counter(path.parent for path in sources if path.name != "__init__.py")
    shape.flat = {str(path.relative_to(package)): n for path, n in folders.most_common()}
    return shape


def lines_brought_along(script: str) -> int:
    """Return the lines of code of the modules of core that a script has imported at its end."""
    listed = (
        f"{script}\nimport sys\n"
        "print('FILES', *(module.__file__ for name, module in sys.modules.items()"
        " if f'{name}.'.startswith('stratagem.') and getattr(module, '__file__', None)), sep='\\n')"
    )
    command = [sys.executable, "-W", "ignore", "-c", listed]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    texts = [Path(file).read_text() for file in done.stdout.partition("FILES\n")[2].splitlines()]
    return sum(lines_of_code(text, ast.parse(text)) for text in texts)


def _summaries(tree: ast.Module) -> Iterator[str]:
    """Yield the first paragraph of each public class's and function's docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text and not node.name.startswith("_"):
                yield text.strip().partition("\n\n")[0].replace("\n", " ")


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


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Return the number of lines without docstrings, comments and blank lines."""
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


def main() -> None:
    """Print the shape."""
    parser = argparse.ArgumentParser(description="Measures the shape of a package.")
    parser.add_argument("package", nargs="?", type=Path, default=CORE)
    parser.add_argument("--texts", action="store_true", help="list docstrings with a filler")
    options = parser.parse_args()
    shape = measure(options.package.resolve())
    args = measure_args(ROOT)
    print(f"files at the top     {len(shape.files)}: {', '.join(shape.files)}")
    print(f"folders at the top   {len(shape.folders)}: {', '.join(shape.folders)}")
    print(f"arrows between rooms {len(shape.arrows)}")
    print(f"circles              {len(shape.circles)}: {[sorted(c) for c in shape.circles]}")
    print(f"floors               {shape.floors}")
    print(f"lines of code        {shape.lines}")
    print(f"filler               {shape.filler} of {shape.docstrings} docstrings")
    for name, texts in (
        ("docstrings with Args", args),
        ("comments", measure_comments(ROOT)),
        ("names of tests", measure_test_names(ROOT)),
    ):
        print(f"filler               {len(texts.filler)} of {texts.count} {name}")
    print("files in a folder    " + ", ".join(f"{k} {n}" for k, n in list(shape.flat.items())[:6]))
    for run, script in RUNS.items():
        print(f"code brought along   {run} {lines_brought_along(script)}")
    if options.texts:
        print(*args.filler, sep="\n\n")


if __name__ == "__main__":
    main()
