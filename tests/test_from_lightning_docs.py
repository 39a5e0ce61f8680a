"""The scripts of docs/start/from-lightning.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "start" / "from-lightning.md"
SCRIPTS = re.findall(r"^```python\n(.+?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=["as it is", "imports changed", "checkpoints"])
def test_a_script_of_the_page_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    finished = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
