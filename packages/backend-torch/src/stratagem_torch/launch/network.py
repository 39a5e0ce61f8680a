"""Ports, addresses, interfaces and the limit of connections of this node; no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from stratagem import system
from stratagem.errors import ConfigurationError
from stratagem.launch import LOOPBACK_INTERFACE

resource = system.optional_module("resource")
LOOPBACK = "127.0.0.1"
# Addresses reserved for documentation. Connecting a datagram socket sends nothing: it only looks up
# a route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_AT_LEAST = 2
"""Connections of a rank to the store: the process group's, and one that waits for messages."""
_AT_MOST = 3
"""The same, with the connection of a save in the background."""
_LONGEST_PATH = 96
"""Bytes of the path of a store's file; that of a socket has 103 at most."""
_STORE = "stratagem-store-"
FORGOTTEN_AFTER = 24 * 3600
"""Seconds after which the files of a killed run are removed by the next run."""
UNIX_FAMILY: int = getattr(socket, "AF_UNIX", -1)
"""Of a socket with a path. Windows has none: ranks meet at a port there."""
_OWN = 16
"""Files that any process with a store has open."""
_OTHERS = 256
"""Further files that it may open: data, workers, logs."""


def make_store(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's class TCPStore, with the option that its builds for Windows need."""
    return kind if sys.platform != "win32" else partial(kind, use_libuv=False)


def make_store_file(folder: str | os.PathLike[str] | None = None) -> str | None:
    """Return the path of a new file by which the ranks of one node meet (torch's FileStore).

    The socket of `distributed.socket_store` lies beside it. Both lie in a separate folder that only
    this user can enter, whereas any user of the node can connect to a port.

    Args:
        folder: the parent folder; None for the folder of temporary files.

    Returns:
        The path. None if the parent folder does not exist, its file system has no locks, or its
        path is too long for a socket; the ranks then meet at a port.

    Example:
        >>> path = make_store_file()
        >>> remove_store_file(path)
    """
    if UNIX_FAMILY < 0:
        return None
    path = None
    try:
        if folder is None:
            _remove_forgotten()
        # The path of a socket must be short: within a folder of its own, its name needs no owner.
        prefix = _STORE if folder is None else "store-"
        path = f"{tempfile.mkdtemp(prefix=prefix, dir=folder)}/store"
        if len(os.fsencode(path)) > _LONGEST_PATH:
            remove_store_file(path)
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            system.lock(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        remove_store_file(path)
        return None
    return path


def _remove_forgotten() -> None:
    """Remove the folders of runs that were killed a day ago or earlier."""
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [entry for entry in entries if entry.name.startswith(_STORE)]
    for folder in folders:
        with contextlib.suppress(OSError):  # another run removes it, too
            about = folder.stat(follow_symlinks=False)
            is_old = about.st_mtime < time.time() - FORGOTTEN_AFTER
            if is_old and about.st_uid == system.user() and not _listens(folder.path):
                shutil.rmtree(folder.path, ignore_errors=True)


def _listens(folder: str) -> bool:
    """Return whether a store serves the socket in a folder."""
    with socket.socket(UNIX_FAMILY) as client:
        return client.connect_ex(f"{folder}/store.socket") == 0


def remove_store_file(path: str | None) -> None:
    """Remove a file of `make_store_file` with its folder; None: do nothing."""
    if path is not None:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # noqa: PTH120 - no pathlib here


def free_port() -> int:
    """Return a free port of this machine.

    Another program may take it before the ranks do. Call this function on the machine of rank 0,
    right before rank 0 starts.

    Example:
        >>> from stratagem.launch import free_port
        >>> 1024 <= free_port() < 65536
        True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this node.

    Args:
        address: an IP address; "": all addresses of this node.
        port: the port; 0: any free port.

    Raises:
        OSError: the port is taken, or the address is not this node's.

    Example:
        >>> with listen() as listener:
        ...     listener.getsockname()[0]
        '127.0.0.1'
    """
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096, dualstack_ipv6=dual)


def address_to_listen_on(main_address: str) -> str:
    """Return the address on which rank 0, on this node, listens for the other nodes.

    Args:
        main_address: rank 0's host as the other nodes know it. An IP address of loopback is
            returned unchanged: then all "nodes" are this machine.

    Returns:
        An IP address, or "" (all addresses) if no network is found.
    """
    if _is_loopback(main_address):
        return main_address
    return (
        _address_towards(main_address)
        or _address_of(os.environ.get(_INTERFACE_VARIABLE, ""))
        or own_address()
        or ""
    )


def address_to_connect_to(main_address: str) -> str:
    """Return the address at which this rank connects to rank 0.

    This is the main address, except on a host that maps its own name to loopback (as Debian's
    installer does, 127.0.1.1). Then rank 0 is on this node, and the address is the one on which
    rank 0 listens for the other nodes.
    """
    found = [] if _is_loopback(main_address) else _addresses_towards(main_address)
    if found and all(map(_is_loopback, found)):
        return address_to_listen_on(main_address) or main_address
    return main_address


def choose_gloo_interface(main_address: str | None) -> str | None:
    """Make gloo listen only on the interface towards the other ranks, unless the user chose one.

    By default gloo takes the interface of this host's name. With ranks on a single node, this
    interface is open to the network. With several nodes, it may be loopback if /etc/hosts maps the
    name to 127.0.1.1: other nodes then connect to themselves.

    Args:
        main_address: rank 0's host; None: all ranks are on this node.

    Returns:
        The interface. None: the user has already chosen one, or no interface was found and gloo
        decides.

    Example:
        >>> import os
        >>> os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
        >>> choose_gloo_interface("node1") is None
        True
        >>> del os.environ["GLOO_SOCKET_IFNAME"]
    """
    if _INTERFACE_VARIABLE in os.environ:
        return None
    interface = LOOPBACK_INTERFACE
    if main_address is not None:
        address = _address_towards(main_address) or own_address()
        interface = None if address is None else _interface_of(address)
    if interface is not None:
        os.environ[_INTERFACE_VARIABLE] = interface
    return interface


def own_address() -> str | None:
    """Return this node's address on the route to other networks.

    None: this node has no such route.
    """
    return next(filter(None, map(_address_towards, _ELSEWHERE)), None)


def _address_towards(host: str) -> str | None:
    """Return this node's address on the route to a host.

    None: no route exists, or only loopback.
    """
    return next((a for a in _addresses_towards(host) if not _is_loopback(a)), None)


def _addresses_towards(host: str) -> list[str]:
    """Return this node's addresses on the routes to a host; []: unknown or unreachable host."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    addresses = []
    for family, kind, _, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as route:
            route.connect(place)
            addresses.append(str(route.getsockname()[0]))
    return addresses


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address.

    None: the interface does not exist, or has no IPv4 address.
    """
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), get_address, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _interface_of(address: str) -> str | None:
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _address_of(name) == address), None)


def allow_connections(world_size: int) -> None:
    """Raise this process's soft limit of open files to the number needed for its ranks.

    Args:
        world_size: the number of ranks that connect to the store that this process holds.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
    if resource is None:
        return  # of a system without such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, wanted = _AT_LEAST * world_size + _OWN, _AT_MOST * world_size + _OTHERS
    if _suffices(soft, wanted):
        return
    if not _suffices(hard, needed):
        raise ConfigurationError(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and its hard limit is {hard}: raise it (`ulimit -Hn`, LimitNOFILE= of "
            "systemd, PropagateResourceLimits= of SLURM)"
        )
    raised = wanted if _suffices(hard, wanted) else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def warn_of_agents_limit(world_size: int) -> None:
    """Warn on rank 0 if its parent holds the store and has a too low limit of open files."""
    if sys.platform != "linux":
        return
    try:
        soft, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:
        return  # the parent belongs to another user
    needed = _AT_LEAST * world_size + _OWN
    if not _suffices(soft, needed):
        warnings.warn(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and the limit of the launcher's (process {os.getppid()}) is {soft}: "
            f"ranks beyond it would wait in vain. Call `ulimit -n {needed}` before the launcher",
            stacklevel=2,
        )


def _suffices(limit: int, needed: int) -> bool:
    return bool(limit == resource.RLIM_INFINITY) or limit >= needed
