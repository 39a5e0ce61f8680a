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


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a page with their lines: of paragraphs, items of lists, and cells.

    The line is the one on which the paragraph or the item begins.
    """
    for pattern in (r"\A---\n.*?\n---\n", _FENCE, r"<!--.*?-->"):
        text = re.sub(pattern, _blank, text, flags=0 if pattern is _FENCE else re.DOTALL)
    text = re.sub(r"</?\w+[^>]*>", " ", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text)
    text = _LINK.sub(r"\1", text)
    # Code is one word.
    text = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "`x`", text)
    for block in re.finditer(r"(?:.*\S.*\n?)+", text):
        line = text.count("\n", 0, block.start()) + 1
        first = block[0].lstrip()
        if first.startswith(("#", "(")):
            continue
        is_table = first.startswith("|")
        for item in re.split(r"\n" if is_table else r"\n(?= *(?:[-*]|\d+\.) )", block[0]):
            for part in item.strip().strip("|").split("|") if is_table else [item]:
                joined = " ".join(re.sub(r"^ *(?:[-*]|\d+\.) ", "", part).split())
                if joined.strip(" -:"):
                    yield from ((line, each) for each in _ENDS.split(joined))
            line += item.count("\n") + 1


def _blank(match: re.Match[str]) -> str:
    """Return the line ends of a match: what follows keeps its line."""
    return "\n" * match[0].count("\n")


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(re.findall(r"[\w`][\w`'.-]*", sentence))


def long_sentences(page: Path) -> tuple[list[str], list[int]]:
    """Return the sentences that are too long, and the lengths of those of more than two words."""
    found = [(line, words(each), each) for line, each in sentences(page.read_text())]
    too_long = [f"{line}: {count} words: {each}" for line, count, each in found if count > LONGEST]
    return too_long, [count for _, count, _ in found if count > 2]


def read_twice(page: Path) -> list[str]:
    """Return the sentences of a page with a phrase that is read twice."""
    return [
        f"{line}: {sentence!r}: write {remedy!r}"
        for line, sentence in sentences(page.read_text())
        for phrase, remedy in TWICE.items()
        if re.search(rf"(?<!\w)({phrase})", sentence)
    ]


def broken_links(path: Path) -> list[str]:
    """Return the links of a Markdown file that lead nowhere or are malformed."""
    broken = []
    text = re.sub(r"`[^`\n]+`", "", _FENCE.sub(_blank, path.read_text()))
    for match in _LINK.finditer(text):
        target = match[2]
        line = text.count("\n", 0, match.start()) + 1
        parts = urlsplit(target)
        if parts.scheme in ("http", "https"):
            if not re.fullmatch(r"[\w.-]+\.\w+(:\d+)?", parts.netloc):
                broken.append(f"{line}: {target}: malformed")
        elif parts.scheme not in ("", "mailto"):
            broken.append(f"{line}: {target}: unknown scheme")
        elif parts.path and not (path.parent / parts.path).exists():
            # A generated page exists once the site was built.
            broken.append(f"{line}: {target}: no such file")
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
            problems.append(f"{page.relative_to(ROOT)}:{each}")
    for path in markdown_files():
        problems += [f"{path.relative_to(ROOT)}:{each}" for each in broken_links(path)]
    print("\n".join(problems))
    print(
        f"{len(pages())} written pages, {len(lengths)} sentences, "
        f"{sum(lengths) / len(lengths):.1f} words in the mean, longest {max(lengths)}"
    )
    return len(problems)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
