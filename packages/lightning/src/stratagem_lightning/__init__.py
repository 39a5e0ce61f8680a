"""Lightning's scripts, unchanged: importing this makes Lightning's names mean Stratagem.

In this process `lightning`, `lightning.pytorch`, `pytorch_lightning`, `lightning.fabric` and
`lightning_fabric`, and the public modules in them, are from then on the modules under
`stratagem_lightning`: the same objects under all of these names. Nothing is installed under them,
and nothing in Stratagem imports this by itself. `stratagem run --as-lightning train.py` does it for
a script and all its ranks; as the first line of a script, the import does the same.

Which name is served from where stands in `layout.py`; classes that have a name or a default of
Lightning's only are in `api/`; what to use in the place of what is not here is in `absent.py`.

Raises:
    ConfigurationError: Lightning itself was imported before.

Example:
    >>> import stratagem_lightning
    >>> import lightning.pytorch as pl
    >>> from lightning.fabric import Fabric
    >>> from stratagem import Lite, Trainer
    >>> issubclass(pl.Trainer, Trainer), issubclass(Fabric, Lite)
    (True, True)
"""

from __future__ import annotations

from typing import Any

from stratagem_lightning import importing

importing.install()


def __getattr__(name: str) -> Any:
    return importing.find(__name__, name)


def __dir__() -> list[str]:
    return importing.names_in(__name__)
