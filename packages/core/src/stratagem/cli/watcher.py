"""A process beside a command that names the plugin at which the command ended or hangs.

Plugins are imported in the process of the command. One that calls `os._exit`, crashes or waits
forever leaves no chance to say so there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from stratagem.discovery import registry
from stratagem.discovery.entry_points import DISABLE_VARIABLE

PATIENCE = 10.0
"""Seconds after which a plugin that is still running is named."""


def start_watcher() -> Callable[[], None]:
    """Start the process that watches this one; return a function that ends it."""
    reading, writing = os.pipe()
    command, child = os.getpid(), os.fork()
    if child == 0:
        try:
            os.close(writing)
            _watch(reading, command)
        finally:
            os._exit(0)
    os.close(reading)

    def tell(plugin: str) -> None:
        with contextlib.suppress(OSError):  # the watcher, or the pipe, is gone
            os.write(writing, f"{plugin}\n".encode(errors="backslashreplace"))

    def stop() -> None:
        registry.announce = registry.announce_nothing
        with contextlib.suppress(OSError):
            os.close(writing)
            os.waitpid(child, 0)

    registry.announce = tell
    return stop


def _watch(reading: int, command: int) -> None:
    """Read which plugin runs, until the command ends; say what has to be said of the last one."""
    import select
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plugin = said = ""
    while True:
        if select.select([reading], [], [], PATIENCE)[0]:
            if not (told := os.read(reading, 1 << 16)):
                break
            plugin = told.decode(errors="replace").splitlines()[-1]
        # A process that a plugin has started may hold the pipe open.
        elif os.getppid() != command:
            break
        elif plugin not in ("", said):
            said = plugin
            _say(f"the plugin {plugin} has not returned after {PATIENCE:.0f} s", plugin)
    if plugin:
        _say(f"the plugin {plugin} ended the process", plugin)


def _say(what: str, plugin: str) -> None:
    name = plugin.partition(" ")[0].partition(":")[0]
    text = f"stratagem: {what}. To go without this plugin, set {DISABLE_VARIABLE}={name}\n"
    os.write(2, text.encode(errors="backslashreplace"))
