"""Lightning's exceptions, as the errors of Stratagem that they are."""

from __future__ import annotations

from stratagem.errors import StratagemError

MisconfigurationException = StratagemError
"""Every error that Stratagem raises on purpose: what Lightning calls a misconfiguration is here a
ConfigurationError or a UserCodeError, which have this in common."""


class SIGTERMException(SystemExit):
    """A run was ended by SIGTERM; for scripts that name it in `except`."""
