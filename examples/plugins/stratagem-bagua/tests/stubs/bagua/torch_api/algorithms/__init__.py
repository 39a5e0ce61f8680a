"""The base of algorithms, which notes what is called."""

from __future__ import annotations

from typing import Any


class Algorithm:
    made: list[Any] = []  # noqa: RUF012 - all of them, for tests

    def __init__(self) -> None:
        self.calls: list[str] = []
        Algorithm.made.append(self)

    def forward(self) -> None:
        self.calls.append("forward")
