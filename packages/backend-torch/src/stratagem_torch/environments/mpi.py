"""MPIEnvironment: processes started by Open MPI's mpirun."""

from __future__ import annotations

import os
import socket

from stratagem.errors import ConfigurationError
from stratagem_torch.environments.rendezvous import AnnouncedPortEnvironment
from stratagem_torch.launch import network


class MPIEnvironment(AnnouncedPortEnvironment):
    """Ranks from the variables that Open MPI's mpirun sets for each process.

    With mpi4py, rank 0 opens a free port and broadcasts its address and port. Without mpi4py, the
    processes of one node still find one another; processes of several nodes need MASTER_ADDR.

    MPI serves only for the rendezvous: gradients go through torch's process group. The wheels of
    torch do not include its "mpi" backend.

    Raises:
        ConfigurationError: mpirun has not started this process, or the job has several nodes and
            neither mpi4py nor MASTER_ADDR is available.

    Example:
        >>> from stratagem.environments import MPIEnvironment
        >>> MPIEnvironment().creates_processes_externally
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._address: str | None = None

    @property
    def main_address(self) -> str:
        """Where rank 0 runs; every rank must ask, since rank 0 broadcasts it."""
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self._one_node:
            return network.LOOPBACK
        if self._address is None:
            self._address = self._meet()
        return self._address

    def _meet(self) -> str:
        """Return rank 0's address, and take its port too."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ConfigurationError(
                f"mpirun has started {self.world_size()} processes on several nodes, which learn "
                f"from one another by mpi4py where rank 0 is, but `import mpi4py` says: {error}. "
                "Install it (pip install mpi4py), or set MASTER_ADDR to the host of rank 0"
            ) from error
        where = None
        if self.global_rank() == 0:
            address = network.address_to_listen_on(socket.gethostname())
            self._listener = network.listen(address)
            where = address or socket.gethostname(), self._listener.getsockname()[1]
        address, self._main_port = MPI.COMM_WORLD.bcast(where, root=0)
        return str(address)

    def _token(self) -> str:
        # Several jobs of mpirun on one node have namespaces of their own.
        host = socket.gethostname() if self._one_node else self.main_address
        return f"mpi {os.environ.get('PMIX_NAMESPACE', '')} {host}"

    def world_size(self) -> int:
        return self._number("OMPI_COMM_WORLD_SIZE")

    def local_world_size(self) -> int:
        return self._number("OMPI_COMM_WORLD_LOCAL_SIZE")

    def global_rank(self) -> int:
        return self._number("OMPI_COMM_WORLD_RANK")

    def local_rank(self) -> int:
        return self._number("OMPI_COMM_WORLD_LOCAL_RANK")
