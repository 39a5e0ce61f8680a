"""Ports, and the addresses and interfaces of this node that others can reach; no torch."""

from __future__ import annotations

import os
import socket
import struct
import sys

# Reserved for documentation: connecting a datagram socket sends nothing, it only looks up a route.
_ELSEWHERE = "192.0.2.1"


def free_port() -> int:
    """Return a port of this machine that nobody listens on now.

    Another program may take it before the ranks do: ask where rank 0 runs, right before it starts.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def choose_gloo_interface(main_address: str) -> str | None:
    """Let gloo listen on the interface that leads to the other nodes, unless the user has chosen.

    By itself it takes the interface of this host's name, which is loopback wherever /etc/hosts maps
    the name to 127.0.1.1, as Debian's installer does: other nodes then connect to themselves.

    Args:
        main_address: rank 0's host.

    Returns:
        The interface, or None: it was chosen already, or none was found and gloo decides.

    Example:
        >>> import os
        >>> os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
        >>> choose_gloo_interface("node1") is None
        True
        >>> del os.environ["GLOO_SOCKET_IFNAME"]
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return None
    address = _address_towards(main_address) or _address_towards(_ELSEWHERE)
    interface = None if address is None else _interface_of(address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    return interface


def own_address() -> str:
    """Return an address of this node that other nodes can reach, or its name if none is known."""
    name = socket.gethostname()
    return _address_towards(name) or _address_towards(_ELSEWHERE) or name


def _address_towards(host: str) -> str | None:
    """Return this node's IPv4 address on the way to a host; None: there is none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((host, 9))
        except OSError:
            return None
        address = str(route.getsockname()[0])
    return None if address.startswith("127.") else address


def _interface_of(address: str) -> str | None:
    import fcntl  # where there is Linux

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), get_address, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
