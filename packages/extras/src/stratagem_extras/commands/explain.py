"""`stratagem explain`: what a request would use, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stratagem.cli import parser_of
from stratagem.discovery import get_registry
from stratagem.errors import StratagemError
from stratagem.launch import RunRequest
from stratagem.plan import resolve

SUMMARY = "Show what a request would use, and why."

_DESCRIPTION = f"""{SUMMARY}

The request is that of a Trainer or Lite with these arguments, in a script. Nothing is started.
One that cannot be met ends with its error and exit code 2.
"""


def explain(arguments: Sequence[str]) -> int:
    """Resolve the request that the arguments make, and print the plan; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = parser_of("explain", _DESCRIPTION)
    add = parser.add_argument
    add("--strategy", default="auto", help="a name, or auto")
    add("--accelerator", default="auto", help="a name, or auto")
    add(
        "--devices",
        type=_number,
        default="auto",
        help="how many, which ('0,2'), -1 for all, or auto",
    )
    add("--num-nodes", type=int, default=1, help="machines that take part")
    add("--precision", type=_number, default="32-true", help="a name, or 64, 32, 16, bf16")
    add("--checkpoint-io", help="a name; the default otherwise")
    add("--cluster-environment", help="a name; detected otherwise")
    add("--why", action="store_true", help="also show what was not taken, and why not")
    options = vars(parser.parse_args(arguments))
    as_json, why = options.pop("json"), options.pop("why")
    try:
        plan = resolve(RunRequest(**options, interactive=False), get_registry())
    except StratagemError as error:
        print(error, file=sys.stderr)
        return 2
    if as_json:
        import json

        fields = ("what", "choice", "provider", "why")
        print(json.dumps([dict(zip(fields, row, strict=True)) for row in plan.rows()], indent=2))
    else:
        print(plan.explain(why=why))
    return 0


def _number(text: str) -> int | str:
    """Return a number as a Trainer would receive it, so that errors quote it in the same way."""
    try:
        return int(text)
    except ValueError:
        return text
