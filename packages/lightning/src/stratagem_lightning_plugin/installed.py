"""What is installed: Lightning itself, and the distributions that stratagem-lightning needs."""

from __future__ import annotations

from importlib.util import find_spec

from stratagem import __version__
from stratagem.discovery import core_range, version_of
from stratagem.errors import ConfigurationError

OWN = "stratagem-lightning"
LIGHTNING = ("lightning", "pytorch-lightning", "lightning-fabric")
"""The distributions whose import names `stratagem_lightning` takes, in a process that asks."""


def installed_lightning() -> dict[str, str]:
    """Return which distributions of Lightning itself are installed, with their versions."""
    found = {name: version_of(name) for name in LIGHTNING}
    return {name: version for name, version in found.items() if version is not None}


def check_installation() -> None:
    """Check that the distributions that Lightning's names need are installed and compatible.

    Raises:
        ConfigurationError: a distribution is missing, or has another minor version; the message
            names the package to install.
    """
    if find_spec("stratagem_extras") is None:
        raise ConfigurationError(
            f"{OWN} needs stratagem-extras, which is not installed: pip install stratagem-extras"
        )
    # None: it runs from a folder that is on the path, without metadata.
    own = version_of(OWN) or __version__
    versions = {"stratagem-core": __version__, "stratagem-extras": version_of("stratagem-extras")}
    for name, version in versions.items():
        if version is not None and core_range(version) != core_range(own):
            raise ConfigurationError(
                f"{OWN} {own} does not work with {name} {version}: expected the same minor "
                f"version: pip install --upgrade {OWN} {' '.join(versions)}"
            )
