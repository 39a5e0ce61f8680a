"""The pages for authors name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from stratagem_testing.author.new_backend import KINDS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_page_of_components_has_every_kind() -> None:
    page = (DOCS / "extend/write-a-component.md").read_text()
    named = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert named == ["--kind", *KINDS]
    (commands,) = blocks("extend/write-a-component.md", "sh")
    assert "stratagem new-backend tape --kind checkpoint-io\n" in commands
