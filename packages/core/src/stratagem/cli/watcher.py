"""Name the plugin that ends or hangs a command, in the command's own process."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem.discovery import registry
from stratagem.discovery.entry_points import DISABLE_VARIABLE

PATIENCE = 10.0
"""The time in seconds after which the traceback of a plugin that has not returned is shown."""


def watch_plugins() -> Callable[[], None]:
    """Name each plugin that ends this process or hangs; return the function that ends this.

    A plugin that calls `os._exit` or raises KeyboardInterrupt is named. A crash and a hang show the
    traceback, with the file of the plugin: nothing else can be said then.
    """
    running, command, leave = "", os.getpid(), os._exit
    if not faulthandler.is_enabled():
        faulthandler.enable(2)

    def tell(plugin: str) -> None:
        nonlocal running
        running = plugin
        if plugin:
            faulthandler.dump_traceback_later(PATIENCE, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def say() -> None:
        if running and os.getpid() == command:
            name = running.partition(" ")[0].partition(":")[0]
            print(
                f"stratagem: the plugin {running} ended the process. To go without this plugin, "
                f"set {DISABLE_VARIABLE}={name}",
                file=sys.stderr,
                flush=True,
            )

    def leave_with_name(status: Any) -> NoReturn:
        say()
        # A plugin that ends a command with 0 would pass for a command that found no problem.
        leave(status or int(bool(running) and os.getpid() == command))

    def stop() -> None:
        registry.announce, os._exit = registry.announce_nothing, leave
        faulthandler.cancel_dump_traceback_later()
        say()

    registry.announce, os._exit = tell, leave_with_name
    return stop
