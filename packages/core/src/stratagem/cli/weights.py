"""`stratagem checkpoint convert` and `average`: the weights of checkpoints, as new files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stratagem.discovery.specs import load_target
from stratagem.errors import CheckpointError, ConfigurationError

KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="The checkpoint's entry with the weights.", show_default=False),
]


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The new file.", show_default=False)],
    *,
    key: KeyOption = None,
    to: Annotated[
        str, typer.Option("--to", help="safetensors, or lightning: a Trainer's, for Lightning 2.x.")
    ] = "safetensors",
) -> None:
    """Write the weights in a checkpoint as a safetensors file, or a whole one for Lightning.

    A safetensors file has nothing but the weights. The source is checked before; the target appears
    whole or not at all. The exit code is 1 if one of them cannot be.
    """
    _do("convert", lambda do: do(source, target, key, to))


def average(
    sources: Annotated[
        list[Path], typer.Argument(help="Checkpoints of one model.", show_default=False)
    ],
    *,
    target: Annotated[Path, typer.Option("--output", "-o", help="The new checkpoint.")],
    key: KeyOption = None,
) -> None:
    """Write a checkpoint whose weights are the mean of those of others.

    Numbers are added in float64; integers have to agree. Only weights and hyperparameters are kept.
    The exit code is 1 if they are of different models, or one cannot be read.
    """
    _do("average", lambda do: do(sources, target, key))


def _do(what: str, call: Callable[[Callable[..., str]], str]) -> None:
    # By name: the program does without torch, and this command cannot.
    do = load_target(f"stratagem.native.checkpoint.weights:{what}", what=f"checkpoint {what}")
    try:
        print(call(do))
    except (CheckpointError, ConfigurationError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
