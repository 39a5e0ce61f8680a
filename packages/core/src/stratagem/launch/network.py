"""Ports, addresses and interfaces of this node, and how many connections it can open; no torch."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import sys
import warnings

from stratagem.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
# Reserved for documentation: connecting a datagram socket sends nothing, it only looks up a route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_AT_LEAST = 2
"""Connections of a rank to the store: its process group's, and the one that it waits by."""
_AT_MOST = 3
"""With that of a save in the background."""
_OWN = 16
"""Files that any such process has open."""
_OTHERS = 256
"""Files that it may open besides: data, workers, logs."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on now.

    Another program may take it before the ranks do: ask where rank 0 runs, right before it starts.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this node.

    Args:
        address: an IP address; "": all that this node has.
        port: 0: any that is free.

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
    """Return the address of this node, which has rank 0, that leads to the other nodes.

    Args:
        main_address: rank 0's host as the other nodes know it. An IP address of loopback stands
            for itself: then all "nodes" are this machine.

    Returns:
        An IP address, or "" (all of them) where no network is found.
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
    """Return the address at which this rank reaches what rank 0 listens on.

    It is the main address, but for a host that maps its own name to loopback (as Debian's installer
    does, 127.0.1.1): rank 0 is on this very node then, and listens where the others reach it.
    """
    found = [] if _is_loopback(main_address) else _addresses_towards(main_address)
    if found and all(map(_is_loopback, found)):
        return address_to_listen_on(main_address) or main_address
    return main_address


def choose_gloo_interface(main_address: str | None) -> str | None:
    """Let gloo listen where the other ranks are and nowhere else, unless the user has chosen.

    By itself it takes the interface of this host's name. For ranks of one node that is open to the
    network, and for those of several it may be loopback, where /etc/hosts maps the name to
    127.0.1.1: other nodes then connect to themselves.

    Args:
        main_address: rank 0's host; None: all ranks are on this node.

    Returns:
        The interface, or None: it was chosen already, or none was found and gloo decides.

    Example:
        >>> import os
        >>> os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
        >>> choose_gloo_interface("node1") is None
        True
        >>> del os.environ["GLOO_SOCKET_IFNAME"]
    """
    if _INTERFACE_VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return None
    if main_address is None:
        interface: str | None = "lo"
    else:
        address = _address_towards(main_address) or own_address()
        interface = None if address is None else _interface_of(address)
    if interface is not None:
        os.environ[_INTERFACE_VARIABLE] = interface
    return interface


def own_address() -> str | None:
    """Return an address of this node that other networks can reach; None: it has none."""
    return next(filter(None, map(_address_towards, _ELSEWHERE)), None)


def _address_towards(host: str) -> str | None:
    """Return this node's address on the way to a host; None: there is none but loopback."""
    return next((a for a in _addresses_towards(host) if not _is_loopback(a)), None)


def _addresses_towards(host: str) -> list[str]:
    """Return this node's addresses on the ways to a host; []: it is not known, or out of reach."""
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
    """Return an interface's IPv4 address; None: there is no such interface, or it has none."""
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
    """Raise this process's soft limit of open files, where it is too low for its ranks.

    Args:
        world_size: the number of ranks that connect to the store that this process holds.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
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
    """Warn on rank 0 where the process that started it holds the store, and cannot open enough."""
    if sys.platform != "linux":
        return
    try:
        soft, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:
        return  # another user's
    needed = _AT_LEAST * world_size + _OWN
    if not _suffices(soft, needed):
        warnings.warn(
            f"{world_size} ranks need {needed} open files in the process that holds the store that "
            f"they meet at, and the limit of the launcher's (process {os.getppid()}) is {soft}: "
            f"ranks beyond it would wait in vain. Call `ulimit -n {needed}` before the launcher",
            stacklevel=2,
        )


def _suffices(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
