"""AnnouncedPortEnvironment: a cluster that names rank 0's host, but no port."""

from __future__ import annotations

import os
import socket

from stratagem.errors import ConfigurationError
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.launch import network
from stratagem.native.environments.beacon import Beacon, find
from stratagem.native.environments.run_secret import SECRET_VARIABLE, RunSecret

_RANK_0_TIMEOUT = 600.0
"""Seconds that a rank waits for rank 0, which the cluster has started at the same time."""


class AnnouncedPortEnvironment(ClusterEnvironment):
    """A cluster that names rank 0's host, but no port: rank 0 announces a free one.

    A subclass says `_token`. MASTER_PORT goes before what is announced.
    """

    def __init__(self) -> None:
        self._main_port: int | None = None
        self._listener: socket.socket | None = None
        self._beacon: Beacon | None = None
        self._secret: RunSecret | None = None

    def _token(self) -> str:
        """Return what this run has and no other that runs at the same time; alike on every rank."""
        raise NotImplementedError

    @property
    def _one_node(self) -> bool:
        return self.world_size() == self.local_world_size()

    @property
    def main_port(self) -> int:
        """Where rank 0 listens; waits until rank 0 has announced it."""
        if "MASTER_PORT" in os.environ:
            return self._number("MASTER_PORT")
        if self._main_port is None:
            secret = RunSecret(self._token(), one_node=self._one_node)
            self._main_port = (
                self._announce(secret)
                if self.global_rank() == 0
                else _find(network.LOOPBACK if self._one_node else self.main_address, secret)
            )
        return self._main_port

    def _announce(self, secret: RunSecret) -> int:
        address = network.LOOPBACK
        if not self._one_node:
            address = network.address_to_listen_on(self.main_address)
        self._listener = network.listen(address)
        port = int(self._listener.getsockname()[1])
        if self.world_size() > 1:
            self._beacon, self._secret = Beacon(secret.own_key, address, port), secret
            # The last thing, so that who finds it finds the beacon too.
            secret.share()
        return port

    def take_listener(self) -> int | None:
        """Return the socket of `main_port`, on rank 0 and once."""
        listener, self._listener = self._listener, None
        return super().take_listener() if listener is None else listener.detach()

    def teardown(self) -> None:
        """End what tells the other ranks where rank 0 is."""
        if self._beacon is not None and self._secret is not None:
            self._beacon.close()
            self._secret.remove()
        self._beacon = self._secret = None


def _find(main_address: str, secret: RunSecret) -> int:
    address = network.address_to_connect_to(main_address)
    port = find(address, secret.keys, _RANK_0_TIMEOUT)
    if port is None:
        raise ConfigurationError(
            f"rank 0 was not found on {main_address!r} within {_RANK_0_TIMEOUT:.0f} s (it proves "
            f"who it is {secret.where}): see what became of rank 0; if the nodes share no such "
            f"folder, set {SECRET_VARIABLE} to the same random text on every rank, or MASTER_ADDR "
            "and MASTER_PORT to where rank 0 can be reached"
        )
    return port
