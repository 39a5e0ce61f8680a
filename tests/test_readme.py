"""The README's scripts run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
SCRIPTS = re.findall(r"^```python\n(.+?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[1])
def test_a_script_of_the_readme_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    finished = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr


def test_the_readme_fits_on_a_screen_and_a_half() -> None:
    assert len(README.read_text().splitlines()) <= 90
