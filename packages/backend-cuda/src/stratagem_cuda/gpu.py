"""GPU: a GPU as a driver lists it, and those that a process sees of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A GPU as the driver lists it, or an instance of one (MIG).

    Attributes:
        index: the index of the GPU on this machine; an instance has the index of its GPU.
        uuid: "GPU-..." or "MIG-...".
        name: the name of the product.
        problem: why our processes cannot use the GPU; "" if they can.
        memory: memory in bytes; None if the driver does not report it.
    """

    index: int
    uuid: str
    name: str
    problem: str = ""
    memory: int | None = None


def visible_gpus(gpus: Sequence[GPU], visible: str | None) -> list[GPU]:
    """Return the GPUs that CUDA shows to a process, in the process's order.

    Args:
        gpus: all GPUs.
        visible: CUDA_VISIBLE_DEVICES: indices, UUIDs or prefixes of UUIDs, separated by commas; the
            first invalid name ends the list, as for CUDA. None if the variable is not set.

    Example:
        >>> from stratagem_cuda.gpu import GPU, visible_gpus
        >>> gpus = (GPU(0, "GPU-aa", "H100"), GPU(1, "GPU-bb", "H100"))
        >>> [gpu.index for gpu in visible_gpus(gpus, "GPU-b,0,7,1")]
        [1, 0]
    """
    if visible is None:
        return _one_instance(list(gpus))
    seen: list[GPU] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            matching = [gpu for gpu in gpus if gpu.index == int(name)][:1]
        elif name.startswith(("GPU-", "MIG-")):
            matching = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        else:
            matching = []
        # An ambiguous prefix selects no GPU; a GPU named twice ends the list as well.
        if len(matching) != 1 or matching[0] in seen:
            break
        seen += matching
    return _one_instance(seen)


def shows_one_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether a variable of CUDA, HIP or ROCr shows this process one GPU only.

    Args:
        environ: environment variables.

    Example:
        >>> from stratagem_cuda.gpu import shows_one_gpu
        >>> [shows_one_gpu({"CUDA_VISIBLE_DEVICES": value}) for value in ("3", "0,1")]
        [True, False]
    """
    given = (environ.get(f"{kind}_VISIBLE_DEVICES", "") for kind in ("CUDA", "HIP", "ROCR"))
    return any(value.strip() and "," not in value for value in given)


def _one_instance(seen: list[GPU]) -> list[GPU]:
    """Return what is left where a GPU is divided: CUDA shows a process one instance of all."""
    instances = [gpu for gpu in seen if gpu.uuid.startswith("MIG-")]
    return instances[:1] or seen
