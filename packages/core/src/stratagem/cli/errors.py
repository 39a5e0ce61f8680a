"""`stratagem errors`: explanations of errors, which are paragraphs of the documentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

from stratagem.cli.console import parser_of, print_table

_DESCRIPTION = """Explain an error that a message names.

Without a name, all explanations are listed. The text is part of the installation: no network is
needed.
"""


def run(arguments: Sequence[str]) -> int:
    """Print one explanation, or their list; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    texts = explanations()
    parser = parser_of("errors", _DESCRIPTION, json=False)
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(texts))
    name = parser.parse_args(arguments).name
    if name is not None and name not in texts:
        from stratagem.discovery.registry import nearest_of  # after failures only

        near = nearest_of(name, list(texts))
        meant = f"; did you mean {near!r}?" if near else ""
        parser.error(f"no error has the name {name!r}: choose from {', '.join(texts)}{meant}")
    if name is None:
        print_table(("name", "explains"), [(n, t.splitlines()[0]) for n, t in texts.items()])
        print("\nNext: stratagem errors NAME")
    else:
        # Links lead to pages, which are not here.
        print(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", texts[name]), end="")
    return 0


def explanations() -> dict[str, str]:
    """Return the texts by name. The first line of each is its title, and the last its page."""
    found = (files("stratagem.cli") / "explanations").iterdir()
    texts = {file.name.removesuffix(".md"): file.read_text("utf-8") for file in found}
    return dict(sorted(texts.items()))
