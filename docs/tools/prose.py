"""Measures the sentences of the pages, and checks the links of Markdown files.

    python docs/tools/prose.py

It fails if a sentence of a page has more than 35 words, if a page has a phrase that readers had to
read twice, if a relative link of a Markdown file of the repository leads nowhere, or if an external
link is malformed. Sphinx checks the links between pages, and their anchors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from blocks import DOCS, pages

ROOT = DOCS.parent
LONGEST = 35
"""Words of a sentence."""

TWICE = {
    r"go(es)? on\b": "continues",
    r"wait(s)? on\b": "continues to wait",
    r"wherever one is": "name the places",
    r"void when": "until",
    r"is played": "is simulated",
    r"is an instance of them": "name both",
    r"whoever|anybody|nobody|somebody": "name the person, or use the passive",
    r"\w+ values go before": "say which value is used",
}
"""Phrases that a reader has to read twice, and what to write."""

_FENCE = re.compile(r"^( *)(`{3,}|:{3,}).*?^\1\2[`:]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_ENDS = re.compile(r"(?<=[.!?:])[\"')*`]*\s+(?=[\"'(*`]*[A-Z0-9`\"])")
_SHORTENED = re.compile(r"\b(e\.g|i\.e|vs|cf|Fig|No)\.$")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of its paragraphs, items of lists, and cells of tables."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = _FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"</?\w+[^>]*>", " ", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text)
    text = _LINK.sub(r"\1", text)
    # Code is one word.
    text = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "`x`", text)
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").splitlines()
        if not lines or lines[0].lstrip().startswith("#") or lines[0].startswith("("):
            continue
        if lines[0].lstrip().startswith("|"):
            for line in lines:
                for cell in line.strip().strip("|").split("|"):
                    if cell.strip(" -:"):
                        yield from _ENDS.split(cell.strip())
            continue
        items = re.split(r"\n(?= *(?:[-*]|\d+\.) )", "\n".join(lines))
        for item in items:
            joined = " ".join(re.sub(r"^ *(?:[-*]|\d+\.) ", "", item).split())
            yield from _ENDS.split(joined)


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(re.findall(r"[\w`][\w`'.-]*", sentence))


def long_sentences(page: Path) -> tuple[list[str], list[int]]:
    """Return the sentences that are too long, and the lengths of those of more than two words."""
    found = [(words(each), each) for each in sentences(page.read_text())]
    too_long = [f"{count} words: {each}" for count, each in found if count > LONGEST]
    return too_long, [count for count, _ in found if count > 2]


def read_twice(page: Path) -> list[str]:
    """Return the sentences of a page with a phrase that is read twice."""
    return [
        f"{sentence!r}: write {remedy!r}"
        for sentence in sentences(page.read_text())
        for phrase, remedy in TWICE.items()
        if re.search(rf"(?<!\w)({phrase})", sentence)
    ]


def broken_links(path: Path) -> list[str]:
    """Return the links of a Markdown file that lead nowhere or are malformed."""
    broken = []
    text = _FENCE.sub("", path.read_text())
    for _, target in _LINK.findall(re.sub(r"`[^`\n]+`", "", text)):
        parts = urlsplit(target)
        if parts.scheme in ("http", "https"):
            if not re.fullmatch(r"[\w.-]+\.\w+(:\d+)?", parts.netloc):
                broken.append(f"{target}: malformed")
        elif parts.scheme not in ("", "mailto"):
            broken.append(f"{target}: unknown scheme")
        elif parts.path and not (path.parent / parts.path).exists():
            # A generated page exists once the site was built.
            broken.append(f"{target}: no such file")
    return broken


def markdown_files() -> list[Path]:
    """Return the Markdown files whose relative links people follow in the repository."""
    return [
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *pages(),
    ]


def main() -> int:
    """Check all pages; return the number of problems."""
    problems, lengths = [], []
    for page in pages():
        too_long, counts = long_sentences(page)
        lengths += counts
        for each in (*too_long, *read_twice(page)):
            problems.append(f"{page.relative_to(ROOT)}: {each}")
    for path in markdown_files():
        problems += [f"{path.relative_to(ROOT)}: {each}" for each in broken_links(path)]
    print("\n".join(problems))
    print(
        f"{len(pages())} written pages, {len(lengths)} sentences, "
        f"{sum(lengths) / len(lengths):.1f} words in the mean, longest {max(lengths)}"
    )
    return len(problems)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
