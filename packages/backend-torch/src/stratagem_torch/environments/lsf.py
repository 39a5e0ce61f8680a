"""LSFEnvironment: processes started by jsrun in an LSF job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem_torch.environments.rendezvous import AnnouncedPortEnvironment


def local_world_size(environ: Mapping[str, str]) -> int:
    """Return the number of jsrun's tasks on this node.

    Raises:
        ConfigurationError: jsrun has started different numbers of tasks on the nodes, or a variable
            is not a number.

    Example:
        >>> environ = {"JSM_NAMESPACE_SIZE": "8", "LSB_HOSTS": "batch a a b b"}
        >>> local_world_size(environ)
        4
    """
    local = environ.get("JSM_NAMESPACE_LOCAL_SIZE")
    if local is not None and local.isdigit():
        return int(local)
    size, hosts = environ.get("JSM_NAMESPACE_SIZE", ""), _compute_hosts(environ)
    if local is not None or not size.isdigit() or not hosts or int(size) % len(hosts):
        raise ConfigurationError(
            "the cluster environment 'LSF' expects as many tasks on each of the hosts "
            f"{', '.join(hosts) or '(none)'}, received JSM_NAMESPACE_SIZE={size!r} and "
            f"JSM_NAMESPACE_LOCAL_SIZE={local!r}: start them with jsrun, the same number on each"
        )
    return int(size) // len(hosts)


def _compute_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that jsrun starts tasks on, in order; the first of all is the batch host."""
    rank_file = environ.get("LSB_DJOB_RANKFILE")
    if rank_file and Path(rank_file).is_file():
        names = Path(rank_file).read_text().split()
    else:
        names = environ.get("LSB_HOSTS", "").split()
    return list(dict.fromkeys(names[1:])) or names[:1]


class LSFEnvironment(AnnouncedPortEnvironment):
    """Ranks from the variables that jsrun sets for each task of an LSF job.

    Rank 0 is taken to be on the first host after the batch host; MASTER_ADDR says otherwise.

    Checked against the documented variables, never run on an LSF cluster.

    Example:
        >>> from stratagem.environments import LSFEnvironment
        >>> LSFEnvironment().creates_processes_externally
        True
    """

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        hosts = _compute_hosts(os.environ)
        if not hosts:
            raise ConfigurationError(
                "the cluster environment 'LSF' expects host names in the file named by "
                "LSB_DJOB_RANKFILE or in LSB_HOSTS; there are none: set MASTER_ADDR to the host of "
                "rank 0"
            )
        return hosts[0]

    def _token(self) -> str:
        # Several jsruns of one job have namespaces of their own.
        job = f"{os.environ['LSB_JOBID']}[{os.environ.get('LSB_JOBINDEX', '')}]"
        return f"lsf {job} {os.environ.get('PMIX_NAMESPACE', '')}"

    def world_size(self) -> int:
        return self._number("JSM_NAMESPACE_SIZE")

    def local_world_size(self) -> int:
        return local_world_size(os.environ)

    def global_rank(self) -> int:
        return self._number("JSM_NAMESPACE_RANK")

    def local_rank(self) -> int:
        return self._number("JSM_NAMESPACE_LOCAL_RANK")
