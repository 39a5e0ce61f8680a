"""AdamW with 8-bit states that are sharded as their parameters are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem_extras.optimizers.blocks import Map, make_scales, parts_of_rows, shard_scales
from stratagem_extras.optimizers.shards import gradient_of, local_of

_CHUNK = 1 << 24
"""The number of elements of which float32 copies exist at once, unless a row has more."""

_WHOLE = {"step", "exp_avg", "exp_avg_sq"}
_PACKED = {
    "step",
    *(f"{name}_{part}" for name in _WHOLE - {"step"} for part in ("codes", "scales")),
}


class AdamW8bit(Optimizer):
    """AdamW with averages in 8-bit codes, on a single device and in the shards of many devices.

    A parameter needs about 2 bytes of state for each element, where `torch.optim.AdamW` needs 8.
    The codes come from Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization": each
    number is a part of the largest absolute value of its block. A block is a part of a row (of the
    last dimension), so that ranks with different rows hold whole blocks. Under fsdp and a mesh the
    state is sharded and saved as the parameters are, and loads on other ranks with the same codes.

    Parameters with one dimension, such as biases and norms, and parameters with less than
    `min_8bit_size` elements keep their averages in float32.

    The state of a parameter has the entries `exp_avg_codes` and `exp_avg_sq_codes` (uint8, of the
    parameter's shape), and `exp_avg_scales` and `exp_avg_sq_scales` (float32, a scale a block).

    Args:
        params: parameters, named parameters, or groups, as for every optimizer of torch.
        lr: the learning rate.
        betas: the coefficients of the averages of the gradient and of its square.
        eps: the term that is added to the denominator.
        weight_decay: the decoupled weight decay.
        block_size: the number of elements of a row that share a scale. A loaded state keeps its
            own.
        min_8bit_size: the number of elements from which a parameter has 8-bit states.

    Raises:
        ConfigurationError: an option is not accepted.

    Example:
        >>> import torch
        >>> from stratagem_extras.optimizers import AdamW8bit
        >>> model = torch.nn.Linear(512, 64)
        >>> optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        >>> model(torch.ones(2, 512)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg_codes"].dtype
        torch.uint8
        >>> optimizer.state[model.weight]["exp_avg_scales"].shape
        torch.Size([64, 2])
        >>> optimizer.state[model.bias]["exp_avg"].dtype
        torch.float32
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer`.

        Raises:
            ConfigurationError: an option of the group is not accepted.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the result of the closure.

        Raises:
            ConfigurationError: a gradient is sparse or complex, or ranks divide the rows of a
                parameter into parts that cut blocks. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg_codes" in state or (not state and _is_packed(parameter, group)):
                    _check_blocks(index, parameter, group)
                work.append((parameter, gradient_of(parameter, "AdamW8bit"), state, group))
        for parameter, gradient, state, group in work:
            if not state:
                state.update(_new_state(parameter, group))
            state["step"] += 1
            if "exp_avg" in state:
                _step_whole(parameter, gradient, state, group)
            else:
                _step_packed(parameter, gradient, state, group)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; codes and scales keep their dtypes, whatever the dtype of the parameter.

        Raises:
            ConfigurationError: the state of a parameter comes from another optimizer.
        """
        # Optimizer.load_state_dict would convert codes to the dtype of the parameter.
        super().load_state_dict({**state_dict, "state": {}})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own, strict=True):
            if index in state_dict["state"]:
                entry = state_dict["state"][index]
                _check_entry(entry, parameter)
                self.state[parameter] = {
                    name: value.to(local_of(parameter).device)
                    if isinstance(value, Tensor)
                    else value
                    for name, value in entry.items()
                }


def _is_packed(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    return parameter.ndim > 1 and parameter.numel() >= group["min_8bit_size"]


def _work_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the computation: float32, or that of the parameter if it is wider."""
    return torch.promote_types(torch.float32, parameter.dtype)


def _new_state(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return averages of zero."""
    state: dict[str, Any] = {"step": 0}
    for name in ("exp_avg", "exp_avg_sq"):
        if _is_packed(parameter, group):
            state[f"{name}_codes"] = torch.zeros_like(
                parameter, dtype=torch.uint8, memory_format=torch.contiguous_format
            )
            state[f"{name}_scales"] = make_scales(parameter, group["block_size"])
        else:
            state[name] = torch.zeros_like(parameter, dtype=_work_dtype(parameter))
    return state


def _step_whole(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> None:
    """Step a parameter whose averages are in float32."""
    own, dtype = local_of(parameter), _work_dtype(parameter)
    weight = own.to(dtype)
    exp_avg, exp_avg_sq = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
    _advance(weight, local_of(gradient).to(dtype), exp_avg, exp_avg_sq, state["step"], group)
    if weight is not own:
        own.copy_(weight)


def _step_packed(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> None:
    """Step a parameter whose averages are codes, a limited number of rows at a time."""
    block, dtype, own = group["block_size"], _work_dtype(parameter), local_of(parameter)
    for name in ("exp_avg_scales", "exp_avg_sq_scales"):
        state[name] = shard_scales(parameter, state[name], block)
    if not own.numel():
        return
    maps = [Map(signed, dtype, own.device) for signed in (True, False)]
    held = [
        tuple(local_of(state[f"{name}_{part}"]).flatten(0, -2) for part in ("codes", "scales"))
        for name in ("exp_avg", "exp_avg_sq")
    ]
    weights = own.reshape(-1, own.shape[-1])
    gradients = local_of(gradient).reshape(weights.shape)
    count = max(1, _CHUNK // own.shape[-1])
    for start in range(0, len(weights), count):
        rows = slice(start, start + count)
        weight = weights[rows].to(dtype)
        exp_avg, exp_avg_sq = (
            one.decode(codes[rows], scales[rows], block)
            for one, (codes, scales) in zip(maps, held, strict=True)
        )
        _advance(weight, gradients[rows].to(dtype), exp_avg, exp_avg_sq, state["step"], group)
        if weight.dtype != weights.dtype:
            weights[rows].copy_(weight)
        for one, values, parts in zip(maps, (exp_avg, exp_avg_sq), held, strict=True):
            for part, new in zip(parts, one.encode(values, block), strict=True):
                part[rows].copy_(new)
    if not own.is_contiguous():  # `weights` is a copy
        own.copy_(weights.view(own.shape))


def _advance(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    group: Mapping[str, Any],
) -> None:
    """Take AdamW's step in place, with the operations of torch's."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    weight.mul_(1 - lr * group["weight_decay"])
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def _check_options(group: Mapping[str, Any]) -> None:
    """Raise for an option that is not accepted.

    Raises:
        ConfigurationError: the message has its name.
    """
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ConfigurationError(
                f"AdamW8bit({name}={group[name]!r}): expected a number from 0 on"
            )
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(
            f"AdamW8bit(betas={betas!r}): expected two numbers from 0 to less than 1"
        )
    for name, least in {"block_size": 1, "min_8bit_size": 0}.items():
        value = group[name]
        if type(value) is not int or value < least:
            raise ConfigurationError(
                f"AdamW8bit({name}={value!r}): expected a whole number from {least} on"
            )


def _check_blocks(index: int, parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Raise if ranks hold parts of the rows of a parameter that are not whole blocks.

    Raises:
        ConfigurationError: the message has a block size that fits.
    """
    parts, columns, block = parts_of_rows(parameter), parameter.shape[-1], group["block_size"]
    if parts == 1 or columns % (parts * block) == 0:
        return
    fitting = 1
    while columns % (parts * 2 * fitting) == 0 and 2 * fitting < block:
        fitting *= 2
    names = group.get("names") or group.get("param_names")
    name = f"{names[index]!r} " if names else ""
    change = f"pass block_size={fitting} to a new run, or " if fitting >= 16 else ""
    raise ConfigurationError(
        f"AdamW8bit received the parameter {name}of shape "
        f"{tuple(parameter.shape)}, whose last dimension is divided into {parts} parts over ranks; "
        f"expected parts of whole blocks of {block}, which are saved and loaded exactly: {change}"
        f'put it into a group with "min_8bit_size": {parameter.numel() + 1}, which keeps its state '
        "in float32"
    )


def _check_entry(entry: Any, parameter: Tensor) -> None:
    """Raise if a saved entry is no state of a parameter.

    Raises:
        ConfigurationError: the names of its parts, or the codes, are others.
    """
    names = set(entry)
    if names != _WHOLE and names != _PACKED:
        raise ConfigurationError(
            f"AdamW8bit received a state with {', '.join(sorted(map(str, names)))}; expected one "
            "that AdamW8bit of stratagem_extras has saved: start with a new optimizer, and load "
            "the weights alone"
        )
    for name in sorted(names - {"step"}):
        value, is_codes = entry[name], name.endswith("_codes")
        shape = value.shape[:-1] if name.endswith("_scales") else value.shape
        expected = parameter.shape[:-1] if name.endswith("_scales") else parameter.shape
        if shape != expected or (value.dtype == torch.uint8) != is_codes:
            raise ConfigurationError(
                f"AdamW8bit received {name} of shape {tuple(value.shape)} and {value.dtype} for a "
                f"parameter of shape {tuple(parameter.shape)}: load the state into the model that "
                "it was saved with"
            )
