"""Requirement: a library that a precision needs, looked for without importing it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.errors import ConfigurationError


@dataclass(frozen=True)
class Requirement:
    """A library that a precision needs.

    Attributes:
        distribution: its name on PyPI.
        versions: which of it, as in "torchao>=0.13,<1"; the extra of this distribution says the
            same, which a test compares.
        extra: of this distribution, which brings it along.

    Example:
        >>> from stratagem_cuda.precision.requirement import Requirement
        >>> Requirement("packaging", ">=20", "none").why_not("float8")
        ''
    """

    distribution: str
    versions: str
    extra: str

    def __str__(self) -> str:
        return self.distribution + self.versions

    def check(self, precision: str) -> None:
        """Look for the library, for a precision of this name.

        Raises:
            ConfigurationError: it is not installed, too old or too new; says the command.
        """
        if why := self.why_not(precision):
            raise ConfigurationError(why)

    def why_not(self, precision: str) -> str:
        """Return why a precision of this name cannot use the library, with the command, or ""."""
        # Here, since a listing of names imports this module.
        from importlib import metadata

        from packaging.specifiers import SpecifierSet

        what = f"precision={precision!r} needs {self}"
        command = f"pip install 'stratagem-backend-cuda[{self.extra}]'"
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return f"{what}, which is not installed: {command}"
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            return (
                f"{what}, received {self.distribution} {version}: {command} installs one that fits"
            )
        return ""


TORCHAO = Requirement("torchao", ">=0.13,<1", "float8")
BITSANDBYTES = Requirement("bitsandbytes", ">=0.46,<1", "bitsandbytes")
TRANSFORMER_ENGINE = Requirement("transformer-engine", ">=2.9,<3", "transformer-engine")
