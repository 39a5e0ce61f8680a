"""The README's scripts run as they stand; test_wheels.py runs its first lines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SCRIPTS = re.findall(r"^```python\n(.+?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[1])
def test_a_script_of_the_readme_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    finished = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr


def test_demo_imports_only_installed_packages() -> None:
    source = (ROOT / "examples/digits.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert imported - sys.stdlib_module_names <= {"sklearn", "stratagem", "torch"}


def test_the_readme_fits_on_a_screen_and_a_half() -> None:
    assert len(README.read_text().splitlines()) <= 90


@pytest.mark.parametrize("page", ["docs/index.md", "docs/start/install.md"])
def test_the_site_begins_with_the_lines_of_the_readme(page: str) -> None:
    first_block = re.compile(r"^```\n(.+?)^```$", re.MULTILINE | re.DOTALL)
    (lines,) = first_block.findall(README.read_text())[:1]
    assert lines.startswith("python -m pip install ./packages/core ")
    assert "# once released" in lines
    assert first_block.findall((ROOT / page).read_text())[:1] == [lines]
