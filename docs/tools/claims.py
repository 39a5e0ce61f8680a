"""Checks that a claim which several pages make has one home, and that the others link to it.

    python docs/tools/claims.py

A page that states a claim outside of its home must link to the home in the same section. A page of
start or guides whose code names `accelerator="cpu"` has one line for readers with GPUs, which is
the same on every page. Extras of packages are written as the installation page writes them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from blocks import DOCS, pages

ROOT = DOCS.parent
README = ROOT / "README.md"
ON_GPUS = (
    'On GPUs, leave out `accelerator="cpu"`: [what changes there]({}several-devices.md#on-gpus).'
)
"""The line for readers with GPUs."""


@dataclass(frozen=True)
class Claim:
    """A statement of fact that several pages make.

    Attributes:
        subject: what it is about, for the message.
        home: the page with the whole truth, relative to docs.
        pattern: matches a sentence that states it.
    """

    subject: str
    home: str
    pattern: str


CLAIMS = [
    Claim(
        "what has run on which hardware",
        "design/hardware.md",
        r"(?i)\b(has|have|was|were|never|only)( \w+)? (run|tried|tested)\b[^.|]*"
        r"\b(GPUs?|CPUs|hardware|TPU|H200)\b|\bCPUs only\b",
    ),
    Claim(
        "what an evaluation reads",
        "guides/several-devices.md",
        r"(?i)evaluat[^.|]*(reads? (each|every) sample|repeats? samples)"
        r"|(each|every) sample( is)? (read|evaluated) once",
    ),
    Claim(
        "what a resumed run reads again",
        "guides/resuming.md",
        r"(?i)(no|none|without)[^.|]*\b(repeated|lost)\b[^.|]*\b(or|and)\b[^.|]*\b(repeated|lost)\b",
    ),
    Claim(
        "when a run that hangs or fails ends",
        "guides/failures.md",
        r"(?i)\b(hangs?|dead|fails|diverged)\b[^.|]*\b(ends?|ended)\b[^.|]*\b(seconds|timeout)\b",
    ),
    Claim(
        "what of a resumed run is exact",
        "guides/resuming.md",
        r"(?i)\bresum\w+\b[^.|]*\b(same bits|bit for bit|bitwise|exact)\b"
        r"|\b(same bits|bit for bit|bitwise|exact)\b[^.|]*\bresum",
    ),
    Claim(
        "how long a step takes beside raw PyTorch",
        "../BENCHMARKS.md",
        r"(?i)\bwithin the noise\b|\bas long as in raw PyTorch\b",
    ),
    Claim(
        "how exact a memory plan is",
        "guides/planning.md",
        r"(?i)\b(plans?|strategies)\b[^.|]*\b(measurements|compared with a GPU)\b",
    ),
    Claim(
        "how near the losses of two strategies are",
        "reference/strategies.md",
        r"(?i)\blosses of \d+ steps\b",
    ),
    Claim(
        "which checkpoints CI loads under which strategy",
        "guides/checkpoints.md",
        r"\b162\b",
    ),
    Claim(
        "how many libraries have the same numbers as with Lightning",
        "reference/lightning-libraries.md",
        r"\b\d+ (of them|libraries)\b",
    ),
    Claim(
        "which checkpoints a run removes",
        "guides/checkpoint-safety.md",
        r"(?i)\bremoves? only\b[^.|]*\b(files?|checkpoints?)\b",
    ),
    Claim(
        "which versions of the plugin API core loads",
        "extend/plugin-api.md",
        r"\bapi_version=\d\b[^.|]*\b(is the version|refuses|loaded)\b",
    ),
]
FROM_CODE = DOCS / "extend" / "kit-checks.md"
"""The page whose tables come from the code. It says what the checks of a kit compare."""
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def unlinked(page: Path, claim: Claim) -> list[str]:
    """Return what states a claim in a section without a link to its home: "LINE: 'TEXT'"."""
    if page in (DOCS / claim.home, FROM_CODE):
        return []
    found = []
    line = 1
    text = _CODE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text())
    for section in re.split(r"(?m)^(?=#+ )", text):
        match = re.search(claim.pattern, section)
        if match and Path(claim.home).name not in section:
            at = line + section.count("\n", 0, match.start())
            found.append(f"{at}: {' '.join(match[0].split())!r}")
        line += section.count("\n")
    return found


def problem_for_gpus(page: Path) -> str:
    """Return what is wrong with a page's line for readers with GPUs; "": nothing."""
    text = page.read_text()
    if page.parent.name not in ("start", "guides") or 'accelerator="cpu"' not in text:
        return ""
    line = ON_GPUS.format("" if page.parent.name == "guides" else "../guides/")
    if page.name == "several-devices.md":
        return "" if "\n## On GPUs\n" in text else "expected a section `On GPUs`"
    return "" if line in text.splitlines() else f"expected the line: {line}"


def wrong_extras(page: Path) -> list[str]:
    """Return the extras that a page writes in another way than the installation page."""
    lines = enumerate(page.read_text().splitlines(), 1)
    pattern = re.compile(r"stratagem-extras\[[\w,]+\]")
    return [f"{number}: {found}" for number, line in lines for found in pattern.findall(line)]


def main() -> int:
    """Check all pages and the README; return the number of problems."""
    problems = []
    for page in [README, *pages()]:
        name = page.relative_to(ROOT)
        for claim in CLAIMS:
            for sentence in unlinked(page, claim):
                problems.append(
                    f"{name}:{sentence} says {claim.subject}: link to docs/{claim.home} in the "
                    "same section"
                )
        if problem := problem_for_gpus(page):
            at = page.read_text().partition('accelerator="cpu"')[0].count("\n") + 1
            problems.append(f"{name}:{at}: {problem}")
        for extra in wrong_extras(page):
            problems.append(f"{name}:{extra}: write stratagem-core[...], as start/install.md does")
    print("\n".join(problems) if problems else "each claim has one home")
    return len(problems)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
