"""The pytest plugin comes by its entry point, and costs those who run no kit nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

TEST = """
import sys

def test_plain(pytestconfig):
    print("plugin:", pytestconfig.pluginmanager.has_plugin("stratagem_testing.plugin"))
    print("torch:", "torch" in sys.modules)
"""


def test_the_entry_point_is_declared() -> None:
    (found,) = entry_points(group="pytest11", name="stratagem_testing.plugin")
    assert found.value == "stratagem_testing.plugin"


@pytest.mark.parametrize(
    ("options", "has_fixture"), [((), True), (("no:stratagem_testing.plugin",), False)]
)
def test_a_plain_run_imports_no_torch(
    options: tuple[str, ...], has_fixture: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_plain.py").write_text(TEST)
    arguments = [part for option in options for part in ("-p", option)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", *arguments, "test_plain.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"plugin: {not arguments}" in done.stdout
    assert "torch: False" in done.stdout


@pytest.mark.parametrize("options", [(), ("-p", "stratagem_testing.plugin")])
def test_a_conftest_and_the_command_line_may_name_the_plugin_too(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["stratagem_testing.plugin"]\n')
    (tmp_path / "test_plain.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", *options, "test_plain.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "plugin: True" in done.stdout
