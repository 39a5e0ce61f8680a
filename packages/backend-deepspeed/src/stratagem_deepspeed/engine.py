"""Engines: made around a model, called through a module of ours, and given back whole."""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import Ranks
from stratagem_deepspeed.config import stage_of


class EngineModule(nn.Module):
    """Calls a model through its engine, or directly before the engine exists.

    The engine is not a submodule: parameters and state belong to the model. Stage 3 needs another
    `torch.nn.functional.linear`, which does not keep unsharded weights for backward. DeepSpeed
    installs this function permanently; this class restores torch's function after each forward and
    backward of the engine.

    Attributes:
        module: the model.
        engine: DeepSpeed's engine; None: not needed yet, or released.
        config: the config of the engine.
        groups: the names of the parameters in each of the optimizer's groups.
        has_gradients: whether a backward has not been followed by a step.
    """

    engine: Any
    has_gradients: bool

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__.update(engine=None, has_gradients=False)
        self.config: dict[str, Any] = {}
        self.groups: list[list[str]] = []
        self._linear: Callable[..., Any] | None = None
        self.around: Callable[[], Any] = contextlib.nullcontext
        """Makes the context of each forward and backward."""
        self._watches: list[Any] = []
        self._sharded: list[tuple[str, nn.Parameter]] = []
        """The trained parameters, if the optimizer steps flat partitions (stages 1 to 3)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result."""
        engine = self.__dict__["engine"]
        if engine is None:
            return self.module(*args, **kwargs)
        if self._linear is None:
            return engine(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Parameters that are gathered in inference mode, and some stay so, cannot train.
            with torch.inference_mode(False), torch.no_grad(), self.linear():
                return engine(*_usable(args), **_usable(kwargs))
        with self.linear():
            return engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the engine's backward from a loss that is divided by the micro-batches already."""
        self.__dict__["has_gradients"] = True
        if self._linear is None:
            self.__dict__["engine"].backward(loss, scale_wrt_gas=False, **kwargs)
            return
        with self.linear():
            self.__dict__["engine"].backward(loss, scale_wrt_gas=False, **kwargs)

    def step(self) -> bool:
        """Let the engine clip, step and clear the gradients; return whether it stepped.

        Raises:
            ConfigurationError: a parameter was frozen since the engine was made.
        """
        for name, parameter in self._sharded:
            if not parameter.requires_grad:
                raise ConfigurationError(
                    f"{name!r} was frozen after its DeepSpeed engine was made, whose optimizer "
                    "would move it on (Adam's momentum, weight decay): freeze it before fit or "
                    "setup, set the lr of its parameter group to 0, or take fsdp or ddp"
                )
        engine = self.__dict__["engine"]
        engine.step()
        self.__dict__["has_gradients"] = False
        return bool(engine.was_step_applied())

    def check_stepped(self) -> None:
        """Check that the engine's step has cleared the gradients, in place of clearing them.

        Raises:
            ConfigurationError: no step has followed, so the gradients would count in the next step.
        """
        if self.__dict__["has_gradients"]:
            raise ConfigurationError(
                "gradients were to be dropped, by zero_grad() or by leaving a step out: a "
                "DeepSpeed engine adds them up until it steps, and has no other way. Leave a batch "
                "out before its backward, or call optimizer.step() after each"
            )

    @contextlib.contextmanager
    def linear(self) -> Iterator[None]:
        """Replace `torch.nn.functional.linear` by the function of stage 3."""
        before, nn.functional.linear = nn.functional.linear, self._linear or nn.functional.linear
        try:
            with self.around():
                yield
        finally:
            nn.functional.linear = before

    def make(
        self, deepspeed: Any, optimizer: Optimizer | None, config: dict[str, Any], ranks: Ranks
    ) -> None:
        """Make the engine, which moves, converts and (at stage 3) shards the model's parameters."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        groups = optimizer.param_groups if optimizer is not None else []
        # DeepSpeed puts flat tensors into the groups, and drops empty groups.
        self.groups = [[names[id(p)] for p in g["params"]] for g in groups if g["params"]]
        if optimizer is None and "optimizer" in config:
            self.groups = [list(names.values())]
        with restored_linear() as linear:
            engine, _, _, _ = deepspeed.initialize(
                model=self.module, optimizer=optimizer, config=config
            )
        self._linear = linear.replaced
        if stage_of(config) == 3:
            # DeepSpeed replaces this function when it shards a model; a model built in shards does
            # not have it.
            self._linear = self._linear or _linear_of_stage_3(engine)
            _share_weights(engine.optimizer)
        self.config = config
        self.__dict__["engine"] = engine
        if ranks.world_size > 1 and hasattr(engine.optimizer, _EPILOGUE):
            _compare_reductions(engine.optimizer, names, ranks)
        self._watches = [watch_frozen(n, p) for n, p in frozen_in(self.module)]
        if stage_of(config) > 0:
            trained = {name for group in self.groups for name in group}
            named = self.module.named_parameters()
            self._sharded = [(n, p) for n, p in named if n in trained and p.requires_grad]
        if stage_of(config) == 3:
            _loosen(self.module)

    def release(self) -> None:
        """Release the engine's optimizer state, gradients and hooks.

        The model goes on being trained or evaluated by another engine; at stage 3 its parameters
        stay sharded.
        """
        engine = self.__dict__["engine"]
        self.__dict__["engine"], self._linear = None, None
        for hook in self._watches:
            hook.remove()
        self._watches, self._sharded = [], []
        if engine is not None:
            _release(engine, self.module)

    def __del__(self) -> None:
        # Nothing else would: functions that torch's autograd holds keep an engine alive.
        if not sys.is_finalizing():
            self.release()


_EPILOGUE, _REDUCTION = (
    "independent_gradient_partition_epilogue",
    "reduce_independent_p_g_buckets_and_remove_grads",
)
"""What ZeRO's optimizers call at the end of a backward, and before that for each gradient."""


def _compare_reductions(zero: Any, names: Mapping[int, str], ranks: Ranks) -> None:
    """Make ranks compare the parameters and the order in which they reduce gradients.

    DeepSpeed puts the gradients of a rank into buckets, one after the other. If ranks have
    gradients of different parameters, it would add gradients of unrelated parameters. Ranks
    exchange 8 bytes after a backward with a new order, or without some parameters.

    Args:
        zero: the optimizer of an engine of stage 1, 2 or 3.
        names: the names of the parameters by their id.
        ranks: the ranks that reduce.
    """
    epilogue, reduction = getattr(zero, _EPILOGUE), getattr(zero, _REDUCTION)
    reduced: list[str] = []
    known: set[tuple[str, ...]] = set()
    groups = getattr(zero, "bit16_groups", None) or zero.fp16_groups
    trained = {id(p) for group in groups for p in group if p.requires_grad}

    def note(parameter: nn.Parameter, *arguments: Any) -> None:
        reduced.append(names.get(id(parameter), "?"))
        reduction(parameter, *arguments)

    def compare() -> None:
        order = tuple(reduced)
        reduced.clear()
        if order and (len(order) < len(trained) or order not in known):
            _compare(order, ranks)
            known.add(order)
        epilogue()

    vars(zero).update({_EPILOGUE: compare, _REDUCTION: note})


def _compare(order: Sequence[str], ranks: Ranks) -> None:
    own = torch.tensor(zlib.crc32("\n".join(order).encode()))
    if len(set(ranks.all_gather(own).tolist())) == 1:
        return
    of_ranks = ranks.gather_objects(list(order))
    everywhere = set(of_ranks[0]).intersection(*of_ranks)
    apart = [[repr(name) for name in names if name not in everywhere] for names in of_ranks]
    if any(apart):
        found = "gradients of different parameters"
    else:
        found, apart = "gradients in different orders", [[*map(repr, names)] for names in of_ranks]
    lists = "; ".join(
        f"rank {rank}: {', '.join(names[:3]) or 'none of its own'}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for rank, names in enumerate(apart)
    )
    raise UserCodeError(
        f"ranks have {found} in one backward ({lists}): expected every rank to use the same "
        "parameters in the same order, since DeepSpeed reduces them by their place. Use them all "
        "on every rank, or DDPStrategy(find_unused_parameters=True), or "
        "FSDPStrategy(find_unused_parameters=True)"
    )


def frozen_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield frozen parameters that could be unfrozen, and that an engine made now never trains."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            yield name, parameter


def watch_frozen(name: str, parameter: nn.Parameter) -> Any:
    """Make backward fail once a parameter has a gradient that the engine would ignore.

    Returns:
        The hook's handle. The hook costs no time as long as the parameter is frozen.
    """

    def refuse(unfrozen: nn.Parameter) -> None:
        unfrozen.grad = None
        raise ConfigurationError(
            f"{name!r} was unfrozen after its DeepSpeed engine was made, which trains what had "
            "requires_grad=True then: unfreeze it before fit or setup, or take fsdp or ddp"
        )

    # torch registers hooks on parameters with a gradient only, and keeps them afterwards.
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(False)


def _usable(data: Any) -> Any:
    """Return data whose tensors of inference mode are copied, since no others may be changed."""
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, data)


class _Replaced:
    """What was put into the place of a function."""

    replaced: Callable[..., Any] | None = None


@contextlib.contextmanager
def restored_linear() -> Iterator[_Replaced]:
    """Restore `torch.nn.functional.linear` afterwards, and keep its replacement."""
    before, seen = nn.functional.linear, _Replaced()
    try:
        yield seen
    finally:
        if nn.functional.linear is not before:
            seen.replaced = nn.functional.linear
            nn.functional.linear = before


def _linear_of_stage_3(engine: Any) -> Callable[..., Any] | None:
    """Return the `linear` of an engine whose model was sharded before."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    wanted = engine._config.zero_config.memory_efficient_linear
    return zero3_linear_wrap if wanted else None


def _share_weights(zero: Any) -> None:
    """Let the optimizer step float32 weights in place, where forward uses float32 too.

    DeepSpeed means to, but compares a device with a device's name (0.19), and keeps a second copy.
    """
    if not hasattr(zero, "fp32_partitioned_groups_flat") or zero.offload_optimizer:
        return
    for working, stepped in zip(
        zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True
    ):
        if working is not None and working.dtype == stepped.dtype:
            stepped.data = working.data


def _loosen(module: nn.Module) -> None:
    """Take away what would keep an engine of stage 3 alive for the rest of the process."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init

    # A list of the modules whose forward runs; the root is in it from the start, and adds itself
    # again on each call.
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [one for one in stack if one is not module]
    # The functions that parameters carry hold the object that has sharded them, and it the module.
    for parameter in module.parameters():
        for function in list(vars(parameter).values()):
            for cell in getattr(function, "__closure__", None) or ():
                if isinstance(cell.cell_contents, Init):
                    cell.cell_contents.module = None


_LINKS = (
    "_dp_group",
    "_hp_mapping",
    "_index_in_param_group",
    "_z3_optimizer",
    "get_full_hp_grad",
    "get_full_hp_param",
    "grad_accum",
    "load_hp_checkpoint_state",
    "param_idx_in_group",
    "set_full_hp_grad",
    "set_full_hp_param",
)
"""What an engine puts on parameters to find its optimizer's state, which they then keep alive."""


def _release(engine: Any, module: nn.Module) -> None:
    optimizer = engine.optimizer
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = getattr(engine, name, None)
        if hook is not None:
            hook.remove()
    if optimizer is not None:
        for name in (_EPILOGUE, _REDUCTION):
            vars(optimizer).pop(name, None)
    engine.destroy()
    for parameter in module.parameters():
        for name in _LINKS:
            vars(parameter).pop(name, None)
    if stage_of(engine.config) != 3:
        return
    # A cache for all engines, with modules as keys.
    for function in _coordinators_caches():
        function.cache_clear()
    for part in module.modules():
        # Classes that hold the engine, and that a next one would use if it found them.
        part.__dict__.pop("pre_bwd_fn", None)
        part.__dict__.pop("post_bwd_fn", None)
        part._parameters = dict(part._parameters)
    if optimizer is not None:
        optimizer.__dict__.clear()


@functools.lru_cache
def _coordinators_caches() -> tuple[Any, ...]:
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator,
    )

    found = []
    for function in vars(PartitionedParameterCoordinator).values():
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        found += [one for one in (function, *inner) if hasattr(one, "cache_clear")]
    return tuple(found)
