"""The example plugins are strangers' distributions: they live on the public names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem_testing.author.private_imports import private_imports_of

PLUGINS = sorted(Path(__file__).parents[1].glob("examples/plugins/*/pyproject.toml"))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.parent.name)
def test_an_example_plugin_imports_public_names_only(plugin: Path) -> None:
    files = [
        path for folder in ("src", "tests") for path in plugin.parent.joinpath(folder).rglob("*.py")
    ]
    assert files
    assert [text for path in files for text in private_imports_of(path)] == []


def test_a_private_import_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(
        "import stratagem.launch\n"
        "from stratagem.launch import pack, supervisor\n"
        "from stratagem.plan.plan import RunPlan\n"
        "from stratagem.strategies import _private\n"
    )
    assert [text.partition(" is not")[0] for text in private_imports_of(file)] == [
        "plugin.py, line 2: stratagem.launch supervisor",
        "plugin.py, line 3: stratagem.plan.plan RunPlan",
        "plugin.py, line 4: stratagem.strategies _private",
    ]
