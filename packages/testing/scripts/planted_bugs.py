"""What the kits say of each component that is wrong on purpose, as a table; about ten minutes.

    OMP_NUM_THREADS=1 python packages/testing/scripts/planted_bugs.py        # all
    OMP_NUM_THREADS=1 python packages/testing/scripts/planted_bugs.py clip   # with this word

The mistakes are in planted_strategies.py and planted_components.py in packages/testing/tests; the
tests beside them hold the kits to their answers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stratagem_testing.components.component import Component
from stratagem_testing.components.server import Server
from stratagem_testing.strategies.session import run_checks

TESTS = Path(__file__).parents[1] / "tests"
Row = tuple[str, str, str, str]


def of_strategies(word: str) -> Iterator[Row]:
    """Yield (class, mistake, check, answer) of each strategy; in one pair of ranks, but the end."""
    bugs = importlib.import_module("test_planted_bugs")
    wrong = importlib.import_module("planted_strategies")
    listed = [(bugs.PLANTED, False), (bugs.AT_THE_END, True)]
    for planted, alone in listed:
        rows = [row for row in planted if word in f"strategy {' '.join(row)}"]
        items = [bugs.item(name, check) for name, check, _ in rows]
        outcomes: dict[Any, Any] = {}
        for some in [[item] for item in items] if alone else [items]:
            with TemporaryDirectory() as folder:
                outcomes |= run_checks(list(dict.fromkeys(some)), Path(folder)) if some else {}
        for (name, check, _), item in zip(rows, items, strict=True):
            try:
                outcomes[item].judge(check)
                answer = "it was not found"
            except AssertionError as error:
                answer = str(error)
            yield name, _mistake(getattr(wrong, name)), check, answer


def of_components(word: str) -> Iterator[Row]:
    """Yield the same of all other kinds, each check in a process of its own."""
    bugs = importlib.import_module("test_planted_components")
    wrong = importlib.import_module("planted_components")
    server = Server()
    try:
        for kind, name, check, phrase in [*bugs.PLANTED, *bugs.SLOW]:
            if phrase and word in f"{kind} {name} {check}":
                component = Component(
                    kind=kind, name=f"{bugs.FILE}:{name}", options=bugs.OPTIONS[kind]
                )
                answer = server.failure(component, check, 240.0) or "it was not found"
                yield f"{kind} {name}", _mistake(getattr(wrong, name)), check, answer
    finally:
        server.close()


def _mistake(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def main() -> None:
    """Print a row for each, as it is known."""
    sys.path.insert(0, str(TESTS))
    word = "".join(sys.argv[1:2])
    print("| planted | the mistake | what the kit says |\n|---|---|---|")
    for source in (of_strategies, of_components):
        for name, mistake, check, answer in source(word):
            said = answer.removeprefix(f"{check}: ").partition("\n")[0].replace("|", "\\|")
            print(f"| {name} | {mistake} | {check}: {said} |", flush=True)


if __name__ == "__main__":
    main()
