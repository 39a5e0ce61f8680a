"""The plugin API is frozen: what authors build on stays, and its guide says what there is."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stratagem
from stratagem.discovery import PLUGIN_API_VERSION

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plugin_api", SCRIPTS / "plugin_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plugin_api"] = module
    spec.loader.exec_module(module)
    return module


api = load_script()
REGENERATE = "python packages/core/scripts/plugin_api.py"


def test_plugin_api_agrees_with_its_snapshot() -> None:
    broken, added = api.differences(api.SNAPSHOT.read_text(), api.snapshot())
    assert not broken, (
        "plugins that were written for this version of the plugin API would break:\n"
        + "\n".join(broken)
        + "\nKeep the former name or signature for one minor version, with a DeprecationWarning, "
        "and write it into the changelog in docs/extend/plugin-api.md; then regenerate: "
        + REGENERATE
    )
    assert not added, (
        "the plugin API has grown, which breaks no plugin:\n"
        + "\n".join(added)
        + "\nRegenerate: "
        + REGENERATE
    )
    assert api.SNAPSHOT.read_text() == api.snapshot(), f"regenerate: {REGENERATE}"


def test_the_snapshot_is_named_by_its_version() -> None:
    assert api.SNAPSHOT.name == f"plugin_api_{PLUGIN_API_VERSION}.txt"
    assert api.SNAPSHOT.read_text().startswith(f"plugin API {PLUGIN_API_VERSION}\n")
    versions = re.findall(r"^\| (\d+) \| [\d.]+ \|", api.GUIDE.read_text(), re.MULTILINE)
    assert max(map(int, versions)) == PLUGIN_API_VERSION


BEFORE = """\
class a.Base
    abstract method run(self) -> None
    attribute name: str
    method stop(self, why: str) -> None

final class a.Spec
    field name: str

function a.make(count: int) -> None
hook stratagem_hook() -> None
"""


@pytest.mark.parametrize(
    ("before", "after", "broken"),
    [
        ("    attribute name: str\n", "", ["removed: a.Base.name"]),
        ("hook stratagem_hook() -> None\n", "", ["removed: stratagem_hook"]),
        (
            "method stop(self, why: str)",
            "method stop(self)",
            [
                "changed: a.Base.stop: method stop(self, why: str) -> None  ->  "
                "method stop(self) -> None"
            ],
        ),
        (
            "    method stop",
            "    abstract method go(self) -> None\n    method stop",
            ["added: a.Base.go: abstract method go(self) -> None"],
        ),
        (
            "    field name: str\n",
            "    field name: str\n    field kind: str\n",
            ["added: a.Spec.kind: field kind: str"],
        ),
        ("    method stop(", "    final method stop(", None),
    ],
)
def test_differences_report_breaking_changes(
    before: str, after: str, broken: list[str] | None
) -> None:
    found, added = api.differences(BEFORE, BEFORE.replace(before, after))
    assert found if broken is None else found == broken
    assert added == []


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        (
            "    method stop",
            "    method go(self) -> None\n    method stop",
            "added: a.Base.go: method go(self) -> None",
        ),
        (
            "    field name: str\n",
            "    field name: str\n    field kind: str = ''\n",
            "added: a.Spec.kind: field kind: str = ''",
        ),
        (
            "function a.make",
            "class a.New\n    field name: str\n\nfunction a.make",
            "added: a.New: class a.New",
        ),
    ],
)
def test_differences_report_additions_separately(before: str, after: str, added: str) -> None:
    broken, found = api.differences(BEFORE, BEFORE.replace(before, after))
    assert broken == []
    assert added in found


def test_every_type_in_a_signature_can_be_imported_by_its_public_name() -> None:
    assert api.unreachable_types() == {}


def test_everything_is_typed() -> None:
    for path, function in api.functions().items():
        assert "return" in function.__annotations__, path
    untyped = [
        f"{path}.{member.name}"
        for path, kind in api.classes().items()
        for member in api.members(kind)
        if member.kind in ("method", "property") and " -> " not in member.text
        if member.kind == "method" or not member.returns
    ]
    assert untyped == []


@pytest.mark.parametrize("name", api.INTERFACES)
def test_an_interface_says_when_each_of_its_methods_is_called(name: str) -> None:
    kind = next(each for path, each in api.classes().items() if path.endswith(f".{name}"))
    said = inspect.getdoc(kind) or ""
    members = [m for m in api.members(kind) if m.kind in ("method", "property")]
    if name == "Ranks":
        assert "called by all ranks alike, in the same order" in " ".join(said.split())
        return
    if name == "ParallelStrategy":  # Strategy says it of the others
        strategy = next(each for path, each in api.classes().items() if path.endswith(".Strategy"))
        members = [m for m in members if not hasattr(strategy, m.name)]
    unsaid = [
        m.name
        for m in members
        if m.role != "final" and m.name != "__init__" and not re.search(rf"\b{m.name}\b", said)
    ]
    assert unsaid == []
    assert [m.name for m in members if not m.about and m.name != "__init__"] == []


def test_plugin_api_guide_has_the_generated_tables() -> None:
    guide = api.GUIDE.read_text()
    assert guide == api.with_tables(guide), f"regenerate: {REGENERATE}"


ROOT = Path(__file__).parents[4]
AUTHORS = sorted(
    path
    for pattern in (
        "packages/backend-*/src/**/*.py",
        "examples/plugins/*/src/**/*.py",
        "tests/third_party/*/src/**/*.py",
    )
    for path in ROOT.glob(pattern)
)


def test_backends_and_examples_import_promised_names_only() -> None:
    """Authors are shown to import what they are promised."""
    assert len({path.relative_to(ROOT).parts[:2] for path in AUTHORS}) >= 3
    frozen = {*api.promised(), *(f"stratagem.{name}" for name in stratagem.__all__)}
    private = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in AUTHORS
        for name in imported_names(path)
        if name not in frozen
    }
    assert sorted(private) == []


def imported_names(path: Path) -> Iterator[str]:
    """Yield what a file imports of core, as "module.name"; of a module, the names that it uses."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in api.PUBLIC:
                    modules[alias.asname or alias.name] = name
                elif str(node.module).partition(".")[0] == "stratagem":
                    yield name
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "stratagem")
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(value, ast.Name) and value.id in modules:
            yield f"{modules[value.id]}.{node.attr}"  # type: ignore[attr-defined]
