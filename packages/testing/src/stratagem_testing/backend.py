"""What this distribution provides, as data; nothing is imported here."""

from __future__ import annotations

from stratagem.discovery import ComponentSpec, hookimpl


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return nothing: the kits are run by pytest."""
    return ()
