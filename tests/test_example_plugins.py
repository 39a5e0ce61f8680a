"""The example plugins are strangers' distributions: they live on the public names alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGINS = sorted(Path(__file__).parents[1].glob("examples/plugins/*/pyproject.toml"))
PUBLIC = {
    "stratagem",
    *("stratagem.accelerators", "stratagem.callbacks", "stratagem.checkpoint"),
    *("stratagem.discovery", "stratagem.environments", "stratagem.errors", "stratagem.launch"),
    *("stratagem.loggers", "stratagem.precision", "stratagem.strategies", "stratagem.testing"),
}
"""The modules that users and authors import from."""


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a module imports; "" stands for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def private_imports(path: Path) -> list[str]:
    """Return what a file imports from Stratagem that is not public."""
    found = []
    for module, name in imported(ast.parse(path.read_text())):
        if module.partition(".")[0] != "stratagem":
            continue
        listed = getattr(importlib.import_module(module), "__all__", None)
        is_public = module in PUBLIC and not name.startswith("_")
        if not is_public or (name and listed is not None and name not in listed):
            found.append(f"{path.name}: {module} {name}".rstrip())
    return found


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.parent.name)
def test_an_example_plugin_imports_public_names_only(plugin: Path) -> None:
    files = [
        path for folder in ("src", "tests") for path in plugin.parent.joinpath(folder).rglob("*.py")
    ]
    assert files
    assert [text for path in files for text in private_imports(path)] == []


def test_a_private_import_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(
        "import stratagem.launch\n"
        "from stratagem.launch import pack, supervisor\n"
        "from stratagem.plan.plan import RunPlan\n"
        "from stratagem.strategies import _private\n"
    )
    assert private_imports(file) == [
        "plugin.py: stratagem.launch supervisor",
        "plugin.py: stratagem.plan.plan RunPlan",
        "plugin.py: stratagem.strategies _private",
    ]
