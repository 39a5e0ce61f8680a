"""Lightning's exceptions, as the errors of Stratagem that they are."""

from __future__ import annotations

from stratagem.errors import CheckpointMismatchError, StratagemError, UserCodeError

MisconfigurationException = StratagemError
"""Every error that Stratagem raises on purpose: what Lightning calls a misconfiguration is here a
ConfigurationError or a UserCodeError, which have this in common."""


class StateDictError(CheckpointMismatchError, RuntimeError):
    """Weights of another model, which torch's `load_state_dict` reports by a RuntimeError.

    Example:
        >>> print(StateDictError.of(CheckpointMismatchError("it lacks a", missing=["a"])))
        it lacks a. Missing key(s) in state_dict: "a"
    """

    @classmethod
    def of(cls, error: CheckpointMismatchError) -> StateDictError:
        """Return one with the same names, and torch's words for them."""
        text, end, name = str(error).partition("\nFor an explanation: ")
        for what, names in (("Missing", error.missing), ("Unexpected", error.unexpected)):
            if names:
                listed = ", ".join(f'"{name}"' for name in names)
                text += f". {what} key(s) in state_dict: {listed}"
        return cls(text + end + name, error.missing, error.unexpected)


class SIGTERMException(SystemExit):
    """A run was ended by SIGTERM; for scripts that name it in `except`."""


class UserRuntimeError(UserCodeError, RuntimeError):
    """An error in a user's class that Lightning reports by a RuntimeError."""


class UserTypeError(UserCodeError, TypeError):
    """An error in a user's class that Lightning reports by a TypeError."""
