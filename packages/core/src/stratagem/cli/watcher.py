"""Name the plugin that ends or hangs a command, in its own process; bound what plugins print."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from threading import Timer
from typing import Any, NoReturn

from stratagem.discovery import registry
from stratagem.discovery.entry_points import DISABLE_VARIABLE

PATIENCE = 10.0
"""The time in seconds after which the traceback of a plugin that has not returned is shown."""
_MOST_PRINTED = 8000
"""The most characters that a plugin may print to each of Python's streams while it runs."""


class _Bounded:
    """A stream that passes on the first characters only, and says so."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._left = stream, _MOST_PRINTED

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._left > 0:
            cut = "...\nstratagem: what else the plugin prints is left out\n"
            self._stream.write(text[: self._left] + cut * (len(text) > self._left))
        self._left -= len(text)
        return len(text)


def watch_plugins() -> Callable[[], None]:
    """Name each plugin that ends this process or hangs; return the function that ends this.

    A plugin that calls `os._exit` or raises KeyboardInterrupt is named. A crash shows the traceback
    with the file of the plugin: nothing else can be said then. A hang shows it too, and names the
    plugin if its code lets other threads run. What a plugin prints is cut.
    """
    running, command, leave = "", os.getpid(), os._exit
    streams, reminder = (sys.stdout, sys.stderr), Timer(0, print)
    if not faulthandler.is_enabled():
        faulthandler.enable(2)

    def tell(plugin: str) -> None:
        nonlocal running, reminder
        running = plugin
        reminder.cancel()
        sys.stdout, sys.stderr = streams
        if plugin:
            faulthandler.dump_traceback_later(PATIENCE, file=2)
            reminder = Timer(PATIENCE + 0.5, say, ["has not returned yet"])  # after the traceback
            reminder.daemon = True
            reminder.start()
            sys.stdout, sys.stderr = map(_Bounded, streams)
        else:
            faulthandler.cancel_dump_traceback_later()

    def say(what: str) -> None:
        if running and os.getpid() == command:
            name = running.partition(" ")[0].partition(":")[0]
            print(
                f"stratagem: the plugin {running} {what}. To go without this plugin, "
                f"set {DISABLE_VARIABLE}={name}",
                file=streams[1],
                flush=True,
            )

    def leave_with_name(status: Any) -> NoReturn:
        say("ended the process")
        # A plugin that ends a command with 0 would pass for a command that found no problem.
        leave(status or int(bool(running) and os.getpid() == command))

    def stop() -> None:
        registry.announce, os._exit = registry.announce_nothing, leave
        say("ended the process")
        tell("")

    registry.announce, os._exit = tell, leave_with_name
    return stop
