"""What this distribution offers for DeepSpeed: specs only, no torch and no SDK."""

from stratagem.discovery import ComponentSpec, hookimpl


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Nothing yet: a name is registered once its strategy trains (see README)."""
    return ()
