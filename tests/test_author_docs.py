"""The pages for authors: their code runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from stratagem_testing.author.new_backend import KINDS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_recipes_run(tmp_path: Path) -> None:
    recipes = blocks("extend/strategy-recipes.md", "python")
    assert len(recipes) >= 6
    finished = run("".join(recipes), tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_the_durable_replace_of_the_page_runs(tmp_path: Path) -> None:
    (script,) = (each for each in blocks("guides/checkpoints.md", "python") if "sqlite3" in each)
    finished = run(script, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert [path.name for path in tmp_path.glob("*.db")] == ["runs.db"]


def test_the_page_of_components_has_every_kind() -> None:
    page = (DOCS / "extend/write-a-component.md").read_text()
    named = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert named == ["--kind", *KINDS]
    (commands,) = blocks("extend/write-a-component.md", "sh")
    assert "stratagem new-backend tape --kind checkpoint-io\n" in commands
