"""Requirement: a library that a precision needs, looked for without importing it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stratagem.errors import ConfigurationError


@dataclass(frozen=True)
class Requirement:
    """A library that a precision needs.

    Attributes:
        distribution: its name on PyPI.
        versions: the supported versions, as in "torchao>=0.13,<1"; equal to the extra of this
            distribution, which a test compares.
        extra: the extra of this distribution that installs it.

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
            ConfigurationError: the library is missing, too old or too new; the message has the
                command to install it.
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

    @contextmanager
    def importing(self, precision: str) -> Iterator[None]:
        """Explain an import of the library that fails, on the ranks.

        Its metadata do not declare the version of torch that it needs, so that pip installs torchao
        0.18, which needs torch 2.10, beside torch 2.9.

        Raises:
            ConfigurationError: the installed torch lacks a name that the library imports.
        """
        try:
            yield
        except ImportError as error:
            from importlib import metadata

            version = metadata.version(self.distribution)
            raise ConfigurationError(
                f"precision={precision!r}: {self.distribution} {version} cannot be imported beside "
                f"torch {metadata.version('torch')} ({error}): upgrade torch, or pip install "
                f"'{self.distribution}<{version}'"
            ) from error


TORCHAO = Requirement("torchao", ">=0.13,<1", "float8")
TORCHAO_MX = Requirement("torchao", ">=0.18,<1", "mxfp8")
BITSANDBYTES = Requirement("bitsandbytes", ">=0.46,<1", "bitsandbytes")
TRANSFORMER_ENGINE = Requirement("transformer-engine", ">=2.9,<3", "transformer-engine")
