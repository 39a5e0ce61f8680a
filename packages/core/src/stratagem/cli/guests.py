"""What other distributions will provide, by the hooks through which they will provide it."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.discovery import Command, ComponentSpec, hookimpl

_TRAINING = "stratagem.cli.training"


@hookimpl
def stratagem_cli() -> Iterable[Command]:
    """Return the commands for authors of plugins, and those that run a Trainer from a config."""
    return (
        Command(
            "new-backend",
            "Write a new distribution with a strategy of your own, to start from.",
            "stratagem.cli.new_backend:run",
        ),
        Command(
            "checkpoint durability",
            "Break saves in every way, and see whether a whole checkpoint is left each time.",
            "stratagem.cli.durability:run",
        ),
        Command("fit", "Train a model that a config file describes.", f"{_TRAINING}:fit"),
        Command(
            "validate", "Validate a model that a config file describes.", f"{_TRAINING}:validate"
        ),
        Command("test", "Test a model that a config file describes.", f"{_TRAINING}:test"),
        Command(
            "predict", "Predict with a model that a config file describes.", f"{_TRAINING}:predict"
        ),
    )


@hookimpl
def stratagem_check_spec(spec: ComponentSpec) -> Iterable[str]:
    """Return what a spec promises that is not so."""
    from stratagem.discovery.checks import check_spec
    from stratagem.discovery.registry import get_registry

    return check_spec(spec, get_registry())


@hookimpl
def stratagem_examine(distribution: str, as_json: bool, verbose: bool) -> int:
    """Print what `stratagem doctor NAME` says."""
    from stratagem.cli.distribution import examine

    return examine(distribution, as_json=as_json, verbose=verbose)
