"""8-bit codes of a matrix by blocks of its rows, and the scales of blocks in the shards of it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem_extras.optimizers.shards import local_of

_EXPONENTS = 7


@lru_cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Return the 256 numbers of the dynamic map, in order: from -1 or 0 to 1.

    The map comes from Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization". Each
    decade below 1 has half of the numbers of the next decade.

    Args:
        signed: True for a map with numbers below 0.

    Example:
        >>> numbers = dynamic_map(signed=False)
        >>> len(numbers), numbers[0], numbers[-1]
        (256, 0.0, 1.0)
    """
    numbers = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        factor = 10.0 ** (exponent + 1 - _EXPONENTS)
        means = [factor * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        numbers += means + [-mean for mean in means if signed]
    return tuple(sorted(numbers))


class Map:
    """A dynamic map on a device.

    Args:
        signed: True for a map with numbers below 0.
        dtype: of decoded numbers.
        device: of the tensors.
    """

    def __init__(self, signed: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.tensor(dynamic_map(signed), dtype=dtype, device=device)
        self.limits = (self.numbers[1:] + self.numbers[:-1]) / 2

    def decode(self, codes: Tensor, scales: Tensor, block: int) -> Tensor:
        """Return the numbers of codes.

        Args:
            codes: shape (rows, columns).
            scales: shape (rows, blocks).
            block: the number of columns of a block.
        """
        decoded = self.numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        factors = scales.repeat_interleave(block, dim=-1)
        return decoded.mul_(factors[:, : codes.shape[-1]])

    def encode(self, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return the codes of numbers, and the largest absolute value of each block.

        Args:
            values: shape (rows, columns).
            block: the number of columns of a block.
        """
        rows, columns = values.shape
        count = blocks_of(columns, block)
        blocks = nn.functional.pad(values, (0, count * block - columns)).view(rows, count, block)
        scales = blocks.abs().amax(dim=-1)
        smallest = torch.finfo(torch.float32).tiny  # for blocks of zeros
        codes = torch.bucketize(
            blocks / scales.clamp(min=smallest).unsqueeze(-1), self.limits, out_int32=True
        )
        return codes.view(rows, -1)[:, :columns].to(torch.uint8), scales


def blocks_of(columns: int, block: int) -> int:
    """Return the number of blocks of a row, of which the last may be shorter.

    Example:
        >>> blocks_of(300, 256)
        2
    """
    return -(-columns // block)


def parts_of_rows(parameter: Tensor) -> int:
    """Return the number of parts that ranks divide each row of a parameter into."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    last = parameter.ndim - 1
    return math.prod(size for placement, size in sizes if getattr(placement, "dim", None) == last)


def make_scales(parameter: Tensor, block: int) -> Tensor:
    """Return scales of zero for a parameter, sharded as the parameter is.

    Args:
        parameter: shape (*, columns), in which ranks have whole blocks.
        block: the number of columns of a block.
    """
    shape = torch.Size((*parameter.shape[:-1], blocks_of(parameter.shape[-1], block)))
    device = local_of(parameter).device
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=device)
    mesh, placements = parameter.device_mesh, parameter.placements
    size, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)
    # Not by DTensor.from_local, which would move shards in host memory to the device.
    return DTensor(  # type: ignore[no-untyped-call]
        torch.zeros(size, device=device),
        DTensorSpec(mesh, placements, tensor_meta=meta),
        requires_grad=False,
    )


def shard_scales(parameter: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return whole scales sharded as the parameter is; others are unchanged."""
    if isinstance(scales, DTensor) or not isinstance(parameter, DTensor):
        return scales
    result = make_scales(parameter, block)
    size, offset = compute_local_shape_and_global_offset(
        scales.shape, parameter.device_mesh, parameter.placements
    )
    region = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
    local_of(result).copy_(scales[region])
    return result
