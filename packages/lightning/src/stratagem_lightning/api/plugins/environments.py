"""Lightning's cluster environments: ours, with what its interface has beside."""

from __future__ import annotations

import logging
import os

from stratagem import environments
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.instance_check import InstanceCheck, of_class

_log = logging.getLogger("lightning.fabric.plugins.environments")


class _Detected(environments.ClusterEnvironment):
    """What Lightning's environments have beside: `detect`, and setters of ranks."""

    variables: tuple[str, ...] = ()
    """Set, all of them, where the environment is there."""

    @classmethod
    def detect(cls) -> bool:
        """Whether this process was started by it."""
        return all(name in os.environ for name in cls.variables)

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the environment says the rank."""
        _log.debug("setting global rank is not allowed; ignored.")

    def set_world_size(self, size: int) -> None:
        """Do nothing: the environment determines the number of ranks."""
        _log.debug("setting world size is not allowed; ignored.")

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the requested numbers with the processes that the environment started.

        Raises:
            ConfigurationError: the environment has another number of ranks.
        """
        if num_devices * num_nodes != self.world_size():
            raise ConfigurationError(
                f"devices={num_devices} and num_nodes={num_nodes}: the product ({num_devices} * "
                f"{num_nodes}) does not match the world size ({self.world_size()}) of "
                f"{type(self).__name__}: change one of the two, or what the job asks for"
            )


class LightningEnvironment(_Detected, environments.PlainEnvironment, metaclass=InstanceCheck):
    """Processes that a launcher here starts, or that were started by hand."""

    is_instance = of_class(environments.PlainEnvironment)

    def __init__(self) -> None:
        self._rank: int | None = None
        self._size: int | None = None

    def set_global_rank(self, rank: int) -> None:
        """Let this process have a rank."""
        self._rank = rank

    def set_world_size(self, size: int) -> None:
        """Set the number of ranks."""
        self._size = size

    def global_rank(self) -> int:
        """Return this process's rank among all."""
        return super().global_rank() if self._rank is None else self._rank

    def world_size(self) -> int:
        """Return the number of ranks."""
        return super().world_size() if self._size is None else self._size


class TorchElasticEnvironment(_Detected, environments.TorchElasticEnvironment):
    """Processes started by torchrun."""

    variables = ("TORCHELASTIC_RUN_ID",)


class LSFEnvironment(_Detected, environments.LSFEnvironment):
    """Processes started by jsrun in an LSF job."""

    variables = (
        "LSB_DJOB_RANKFILE",
        "LSB_JOBID",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
    )

    def __init__(self) -> None:
        """Look for the job's hosts and its number.

        Raises:
            ConfigurationError: the variables of an LSF job are missing.
        """
        hosts = "LSB_DJOB_RANKFILE"
        if not os.environ.get(hosts) and not os.environ.get("LSB_HOSTS"):
            found = f"The environment variable `{hosts}` is empty"
            if hosts not in os.environ:
                found = f"Did not find the environment variable `{hosts}`"
            raise ConfigurationError(f"{found}: start the ranks with jsrun in an LSF job")
        if "LSB_JOBID" not in os.environ:
            raise ConfigurationError(
                "Could not find job id in environment variable LSB_JOBID: start the ranks with "
                "jsrun in an LSF job"
            )
        super().__init__()


class SLURMEnvironment(_Detected, environments.SLURMEnvironment):
    """Processes started by srun."""

    variables = ("SLURM_NTASKS",)

    @classmethod
    def detect(cls) -> bool:
        """Whether srun has started this process, and not as a shell."""
        return super().detect() and cls.job_name() not in ("bash", "interactive")

    @staticmethod
    def job_name() -> str | None:
        """Return the job's name, or None."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """Return the job's number, or None; also None in an interactive shell."""
        if SLURMEnvironment.job_name() in ("bash", "interactive"):
            return None
        number = os.environ.get("SLURM_JOB_ID", "")
        return int(number) if number.isdigit() else None


class KubeflowEnvironment(_Detected, environments.KubeflowEnvironment):
    """Pods of a PyTorchJob."""

    @classmethod
    def detect(cls) -> bool:
        """Raise: a pod of a PyTorchJob cannot be recognized, so name the environment.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "KubeflowEnvironment can't be detected automatically, since nothing tells a pod of a "
            "PyTorchJob from another one: name the environment, plugins='kubeflow'"
        )


class MPIEnvironment(_Detected, environments.MPIEnvironment):
    """Processes started by mpirun."""

    variables = ("OMPI_COMM_WORLD_SIZE",)
