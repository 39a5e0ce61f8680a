"""Saying, once, that torch.compile compiles again and again, and why."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import Any

from stratagem.compile.modules import compiled_parts

_EXPECTED = ("grad_mode", "inference_mode", ".training", "GLOBAL_STATE", "BACKEND_MATCH")
"""In a reason: training and evaluation have a graph each, and so has each request."""
_OF_SHAPES = (
    "Batches of other shapes, such as a smaller last one, each need another graph: pass "
    "drop_last=True to the DataLoader, pad the batches, or pass compile={'dynamic': True}"
)
_OF_VALUES = (
    "A Python value that changes needs another graph each time: keep it as it is, or make it a "
    "tensor; of an optimizer's options, only the learning rate may change (for OneCycleLR pass "
    "cycle_momentum=False)"
)


class _Watcher(logging.Filter):
    """Hears of compilations from torch; tells the user of the first that repeats another."""

    def __init__(self) -> None:
        super().__init__()
        self.tells = False
        self._told: set[str] = set()

    def begin(self, *, tells: bool) -> None:
        """Tell once more; only on one rank."""
        self.tells = tells
        self._told.clear()

    def on_compile_start(self, arguments: Any) -> None:
        """Called by torch before it compiles; its compile id is `frame/count`."""
        _, _, count = str(arguments.compile_id).partition("/")
        # A backward that is compiled at its first use, and others, are none of a frame of code.
        is_frame = arguments.callback_trigger.name == "DYNAMO"
        if not is_frame or not count[:1].isdigit() or count[0] == "0":
            return
        reason = _reason()
        if reason is None or not any(mode in reason for mode in _EXPECTED):
            self._tell(
                "again",
                f"torch.compile compiles a part of the model again{_because(reason)}. "
                + _advice(reason),
            )

    def filter(self, record: logging.LogRecord) -> bool:
        """Look at what torch logs; its own message stays."""
        if str(record.msg).startswith("torch._dynamo hit config."):
            arguments = record.args if isinstance(record.args, tuple) else ()
            function = arguments[2] if len(arguments) > 2 else "a function"
            reason = str(arguments[3]) if len(arguments) > 3 else None
            self._tell(
                "limit",
                f"torch.compile has compiled {function} as often as it may, and what does not fit "
                f"those graphs runs uncompiled from here on{_because(reason)}. {_advice(reason)}; "
                "torch._dynamo.config.recompile_limit raises the limit",
            )
        return True

    def _tell(self, what: str, message: str) -> None:
        if self.tells and what not in self._told and len(compiled_parts):
            self._told.add(what)
            warnings.warn(message, stacklevel=2)


def _because(reason: str | None) -> str:
    if not reason:
        return " (TORCH_LOGS=recompiles says why)"
    # Its first line is the guard that failed; the rest, where it was made.
    return ", since this has changed: " + reason.strip().splitlines()[0].strip()


def _advice(reason: str | None) -> str:
    shapes = reason is None or any(word in reason for word in ("size", "stride", "shape"))
    return _OF_SHAPES if shapes else _OF_VALUES


def _reason() -> str | None:
    """Return why torch compiles again, where this torch says it."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    context = utils.get_metrics_context() if hasattr(utils, "get_metrics_context") else None
    reason = getattr(context, "_metrics", {}).get("recompile_reason")
    # Of another backend torch 2.9 has no words, after the number of what was compiled before.
    return None if reason is None else re.sub(r":\s*$", ": BACKEND_MATCH", str(reason))


_watcher = _Watcher()


def watch_recompilations(*, tells: bool) -> None:
    """Tell of recompilations of the models that are compiled, once from here on.

    torch calls what is registered here when it compiles; a step pays nothing.

    Args:
        tells: whether this rank is the one that does.
    """
    _watcher.begin(tells=tells)
    import torch._dynamo.callback as callback  # compiling imports it anyway

    handler = callback.callback_handler
    if _watcher.on_compile_start not in handler.start_callbacks:
        handler.register_start_callback(_watcher.on_compile_start)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_watcher)
