"""Compilation: what `compile=...` asks for, before torch is asked whether it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from stratagem.discovery.capabilities import Capabilities
from stratagem.errors import ConfigurationError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes that torch documents; it may know more."""
_KNOWN = ("backend", "dynamic", "fullgraph", "mode", "options", "step")


@final
@dataclass(frozen=True)
class Compilation:
    """How torch.compile is used on a model.

    Attributes:
        whole_step: forward, backward, clipping and the optimizer's step are one graph; False: the
            forward of the model and of its parts.
        arguments: torch.compile's own: `mode`, `backend`, `dynamic`, `fullgraph`, `options`.

    Example:
        >>> from stratagem.strategies import Compilation
        >>> Compilation.parse({"dynamic": True})
        Compilation(whole_step=False, arguments={'dynamic': True})
        >>> Compilation.parse("step").whole_step, Compilation.parse(False)
        (True, None)
    """

    whole_step: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Any) -> Compilation | None:
        """Return what `compile=given` asks for; None: nothing.

        Args:
            given: False or None; True; "step"; or torch.compile's arguments, and with them
                `"step": True` for the whole step.

        Raises:
            ConfigurationError: it is something else.
        """
        if given is None or given is False:
            return None
        if given is True or given == "step":
            return cls(whole_step=given == "step")
        if isinstance(given, Compilation):
            return given
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"compile={given!r}: expected True, False, 'step', or a dict of torch.compile's "
                f"arguments{_meant(given)}"
            )
        if unknown := sorted(map(str, given.keys() - set(_KNOWN))):
            raise ConfigurationError(
                f"compile={dict(given)!r} has {', '.join(unknown)}; expected some of "
                f"{', '.join(_KNOWN)}"
            )
        arguments = {name: value for name, value in given.items() if name != "step"}
        whole_step = given.get("step", False)
        if not isinstance(whole_step, bool):
            raise ConfigurationError(f"compile={{'step': {whole_step!r}}}: expected True or False")
        return cls(whole_step=whole_step, arguments=arguments)

    @property
    def needs_compiler(self) -> bool:
        """Whether code is generated that a C++ compiler builds, for models on the CPU."""
        return bool(self.arguments.get("backend", "inductor") == "inductor")

    def __str__(self) -> str:
        """The argument as it is typed."""
        if not self.arguments:
            return "compile='step'" if self.whole_step else "compile=True"
        step = {"step": True} if self.whole_step else {}
        return f"compile={ {**step, **self.arguments}!r}"


def check_compiles(strategy: str, capabilities: Capabilities, compilation: Compilation) -> None:
    """Check that a strategy can have its model, or its whole step, compiled.

    Raises:
        ConfigurationError: it cannot.
    """
    what = "step" if compilation.whole_step else "model"
    if what in capabilities.compiles:
        return
    if capabilities.compiles:
        raise ConfigurationError(
            f"{compilation} takes forward, backward and the optimizer's step into one graph, which "
            f"the strategy {strategy!r} does not allow: pass compile=True, which compiles the "
            "model, or strategy='single_device' with devices=1"
        )
    raise ConfigurationError(
        f"{compilation}: a model under the strategy {strategy!r} cannot be compiled by "
        "torch.compile: leave compile out, or use another strategy such as 'ddp' or 'fsdp'"
    )


def _meant(given: Any) -> str:
    """Return what a string may have been meant for."""
    if not isinstance(given, str):
        return ""
    if given.strip().casefold() in ("step", "steps", "one_step", "whole_step"):
        return "; did you mean compile='step'?"
    what = "mode" if given in MODES else "backend"
    return f"; did you mean compile={ {what: given}!r}?"
