"""The Ray cluster of a launch: one that is there, or a local one that ends with the launch."""

from __future__ import annotations

import builtins
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stratagem.errors import ConfigurationError

_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, it makes Ray's own processes listen on loopback only."""
_PATIENCE = 10.0
"""Seconds that a cluster has to answer at its address."""
_REPORTS_USAGE = "RAY_USAGE_STATS_ENABLED"
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
"""What the variables begin with that are set here, or that Ray sets in this process."""


@contextmanager
def connection(address: str | None, cpus: int) -> Iterator[None]:
    """Connect this process to a Ray cluster, unless it is; what was begun here ends here.

    Args:
        address: as of `ray.init`; None: RAY_ADDRESS, or else a local cluster is started. One that
            happens to run on this machine is not taken ("auto" says so).
        cpus: how many CPUs a local cluster has at least; Ray's are numbers, not cores.

    Raises:
        ConfigurationError: there is no cluster at the address, or a local one would be open to
            the network.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    before = {name: value for name, value in os.environ.items() if name.startswith(_OF_RAY)}
    # Ray puts its own in their places, and leaves them there.
    shown, hook, handler = builtins.print, sys.excepthook, signal.getsignal(signal.SIGTERM)
    try:
        if address and address != "local":
            _connect(address)
        else:
            _start(cpus)
        import ray

        try:
            yield
        finally:
            ray.shutdown()
    finally:
        for name in [name for name in os.environ if name.startswith(_OF_RAY)]:
            del os.environ[name]
        os.environ.update(before)
        builtins.print, sys.excepthook = shown, hook
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _connect(address: str) -> None:
    if address.startswith(("127.", "localhost:", "[::1]:")):
        # Ray would look for it at this machine's address in the network.
        os.environ[_LOOPBACK_ONLY] = "0"
    import ray

    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "://" not in host:
            # Ray itself tries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        ray.init(address=address, logging_level="warning")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigurationError(
            f"no Ray cluster can be reached at {address!r} ({type(error).__name__}: {error}): "
            "expected the address of one that runs (`ray start --head` prints it) as "
            "RayLauncher(address=...) or RAY_ADDRESS, or neither, to start a local one; a cluster "
            "that was started with a token needs RAY_AUTH_MODE=token and the token here as well"
        ) from error


def _start(cpus: int) -> None:
    os.environ[_LOOPBACK_ONLY] = "0"
    # Nobody has asked for a cluster that tells its makers of it.
    os.environ.setdefault(_REPORTS_USAGE, "0")
    import ray

    here = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(here).is_loopback:
        raise ConfigurationError(
            f"Ray was imported before this launch, so that a local cluster would listen on {here} "
            f"and all other interfaces: set {_LOOPBACK_ONLY}=0 before `import ray`, leave that "
            "import out, or call ray.init() yourself if it is meant"
        )
    ray.init(
        address="local",
        num_cpus=max(cpus, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level="warning",
    )
