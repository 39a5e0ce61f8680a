"""Names of Lightning that Stratagem does not have, and what to use instead."""

from __future__ import annotations

from stratagem.discovery import nearest_of
from stratagem_lightning.layout import LAYOUT

INSTEAD = {
    "pytorch.utilities.upgrade_checkpoint": "Lightning's own, where Lightning is installed, for "
    "checkpoints of its versions before 2.0",
    "pytorch.loops": "Trainer's attributes, and stratagem.Lite for a loop of your own",
    "pytorch.core.saving": "LightningModule.load_from_checkpoint",
    "pytorch.trainer.call": "the method itself: getattr(callback, hook)(trainer, module, ...)",
    "pytorch.trainer.connectors": "Trainer's attributes and its arguments",
    "pytorch.strategies.launchers": "launcher='script', 'spawn' or 'fork' of a strategy",
    "fabric.utilities.device_parser": "the arguments accelerator and devices",
}
"""By the module or name, as it stands under `lightning`."""


def explain(module: str, name: str) -> str:
    """Return the explanation of a name that is absent here.

    Args:
        module: in Stratagem, "stratagem_lightning" or one under it.
        name: in it.

    Example:
        >>> explain("stratagem_lightning.pytorch", "_graveyard")
        "'lightning.pytorch._graveyard' is private to Lightning (a leading underscore): \
stratagem_lightning serves public names only"
    """
    place = f"{module}.{name}".removeprefix("stratagem_lightning").removeprefix(".")
    shown = f"'lightning.{place}'"
    parts = place.split(".")
    places = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    instead = next((INSTEAD[known] for known in places if known in INSTEAD), "")
    if instead:
        return f"Stratagem has no {shown}; use {instead}"
    private = next((part for part in place.split(".") if part.startswith("_")), "")
    if private:
        return (
            f"{shown} is private to Lightning (a leading underscore): stratagem_lightning serves "
            "public names only"
        )
    near = nearest_of(name, LAYOUT.get(".".join(parts[:-1]), ()), cutoff=0.8)
    parent = ".".join(("lightning", *parts[:-1]))
    advice = f"did you mean {near!r}?" if near else f"`dir({parent})` lists what it has"
    return f"Stratagem has no {shown}; {advice}"
