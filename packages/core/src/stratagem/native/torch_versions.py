"""What differs between the versions of torch that core takes: each once, and when it can go."""

from __future__ import annotations

import warnings
from inspect import signature

from torch.nn.parallel import DistributedDataParallel

FORWARD_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""DDP's argument: whether rank 0's buffers are sent before each forward pass. The earlier name is
deprecated in torch 2.13, and needed up to 2.12."""


def takes_unused_parameters(fsdp_module: type) -> bool:
    """Whether FSDP2 reduces a group of whose parameters a rank left some unused: since torch 2.13.

    Args:
        fsdp_module: `torch.distributed.fsdp.FSDPModule`; imported there, since ddp does without.
    """
    return hasattr(fsdp_module, "set_reduce_scatter_unused_params")


def quiet_dcp_writer() -> None:
    """Ignore one warning of the writer of torch.distributed.checkpoint, about its own code.

    It asks for a storage in a deprecated way in torch 2.9, with which this can go. The filter
    stays: a save may run in a thread, and `warnings.catch_warnings` is the whole process's.
    """
    warnings.filterwarnings(
        "ignore",
        message="TypedStorage is deprecated",
        category=UserWarning,
        module=r"torch\.distributed\.checkpoint\.filesystem$",
    )
