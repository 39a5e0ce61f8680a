"""Component: what is tested, and how; it travels to another process as weights-only-safe data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem.discovery import ComponentSpec, get_registry
from stratagem_testing.places import find, is_place


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component under test.

    Attributes:
        kind: as in its spec; "plugin": a distribution.
        name: a discovered name; or the place of a class, or of a function without arguments that
            creates a component: "package.module:name" or "/path/of/file.py:name".
        options: further attributes of its kit's class; weights-only-safe data.
        search_path: folders that are searched for modules and distributions before others.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    search_path: tuple[str, ...] = ()

    @property
    def spec(self) -> ComponentSpec | None:
        """The spec of its plugin.

        None: the component is a place, and not published.
        """
        return None if is_place(self.name) else get_registry().find(self.kind, self.name).spec

    def make(self) -> Any:
        """Return a new one."""
        spec = self.spec
        return find(self.name)() if spec is None else spec.build()

    @property
    def given(self) -> Any:
        """The value that a front end receives: the name, or a new object."""
        return self.make() if is_place(self.name) else self.name
