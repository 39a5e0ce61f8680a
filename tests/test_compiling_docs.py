"""The script of docs/guides/compiling.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.compile import takes_whole_steps

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "compiling.md"


@pytest.mark.skipif(
    not takes_whole_steps(), reason="this torch.compile takes no backward into the graph"
)
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.+?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    finished = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        # Compiled in this process, so that no worker is left, and on one thread.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr
