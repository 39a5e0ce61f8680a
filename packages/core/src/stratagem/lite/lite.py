"""Lite: your own training loop, with any strategy."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compile import own_module
from stratagem.data import sharding
from stratagem.data.pytree import map_tensors, move_to_device
from stratagem.distributed.uneven_inputs import UnevenInputs
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.ranks import ReduceOp
from stratagem.interfaces.strategy import Strategy
from stratagem.lite.dataloader import LiteDataLoader
from stratagem.lite.module import LiteModule
from stratagem.lite.state import STRATEGY_STATE, collect, restore
from stratagem.plan.step_options import GradientClip, StepOptions
from stratagem.rng import seed_everything
from stratagem.runtime.device_errors import explained_device_errors, raise_explained
from stratagem.runtime.optimizer import LiteOptimizer, wrap_optimizer
from stratagem.runtime.prepare import (
    Compile,
    check_backward,
    check_setup,
    compilation_of_setup,
    prepare,
    prepared_of,
    warn_of_lost_epsilon,
)
from stratagem.runtime.runtime import Devices, FrontEnd, Plugin, Runtime, as_list
from stratagem.state.shards import read_whole
from stratagem.storage import paths

PathLike = str | os.PathLike[str]


class Lite(FrontEnd):
    """Gives a hand-written loop devices, processes, precision and checkpoints.

    Either subclass it, write the loop in `run` and call that; or make one, call `launch` and go on
    in the same script. One rank needs no `launch`.

    Args:
        accelerator: a name ("cpu", "gpu", ...), an Accelerator, or "auto".
        strategy: a name, a Strategy, or "auto".
        devices: how many, which, -1 for all, or "auto".
        num_nodes: machines taking part.
        precision: a name ("32-true", "bf16-mixed", ...), 64, 32, 16, "bf16", or a Precision.
        plugins: CheckpointIO, ClusterEnvironment, Launcher or Precision objects, or names of them.
        callbacks: objects whose methods `call` finds.
        loggers: where `log_dict` writes.
        async_save: write checkpoints while training goes on, in whatever format.
        step_options: what the strategy is to know of your steps, such as
            `StepOptions(sync_batchnorm=True)`; your own loop clips and accumulates.

    Attributes:
        plan: what was chosen, and why; `lite.plan.explain()` is its text.
        strategy: its ranks and device are known once processes are launched.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> class Fit(Lite):
        ...     def run(self, steps: int) -> float:
        ...         model = torch.nn.Linear(2, 1)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...         model, optimizer = self.setup(model, optimizer)
        ...         for _ in range(steps):
        ...             optimizer.zero_grad()
        ...             loss = model(torch.ones(4, 2)).square().mean()
        ...             self.backward(loss)
        ...             optimizer.step()
        ...         return loss.item()
        >>> Fit(accelerator="cpu", devices=1).run(steps=50) < 1e-3
        True
    """

    def __init__(
        self,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision = "32-true",
        plugins: Plugin | Sequence[Plugin] | None = None,
        callbacks: object | Sequence[object] | None = None,
        loggers: object | Sequence[object] | None = None,
        *,
        async_save: bool = False,
        step_options: StepOptions | None = None,
    ) -> None:
        self._runtime = Runtime(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            async_save=async_save,
            step_options=step_options,
        )
        self.plan = self._runtime.plan
        self.strategy: Strategy = self._runtime.strategy
        self._callbacks = as_list(callbacks)
        self._loggers = as_list(loggers)
        self._prepared: list[PreparedModel] = []
        self._weight = 1.0
        """Weight of the present batch's loss; see `join_uneven_inputs`."""
        own_run: Callable[..., Any] | None = getattr(type(self), "run", None)
        if own_run is not None:
            # `self.run(...)` launches; `super().run(...)` within it is an ordinary call.
            vars(self)["run"] = functools.partial(self.launch, own_run)

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and set up their environment.

        Args:
            function: called as `function(lite, *args, **kwargs)` on every rank; None returns, and
                the script goes on on every rank.

        Returns:
            The function's result on this rank.

        Raises:
            ConfigurationError: the launcher needs a function, and none was given.
            RankFailedError: another rank failed; shows its traceback.
        """
        if function is None:
            return self._runtime.launch()
        return self._runtime.launch(function, self, *args, **kwargs)

    # -- ranks and devices

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.node_rank

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._runtime.launched_strategy().device

    def to_device(self, data: Any) -> Any:
        """Return a model, tensor or nested collection of tensors on this rank's device."""
        return move_to_device(data, self.device)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which to build a model.

        Its parameters are made on the device, in the right dtype and, under a sharding
        strategy, sharded.

        Args:
            empty_init: accepted and ignored: parameters always get their constructor's values.
        """
        return self._runtime.init_module()

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        """Return every rank's tensors: each of shape (world_size, *shape).

        Args:
            data: a tensor, number, or nested collection of them, of the same shape on every rank.
            sync_grads: let gradients flow through it.
        """
        ranks = self.ranks
        return map_tensors(
            lambda tensor: ranks.all_gather(tensor, sync_grads=sync_grads), _tensors(data)
        )

    def all_reduce(self, data: Any, reduce_op: ReduceOp = "mean") -> Any:
        """Return the reduction of tensors over ranks.

        Args:
            data: a tensor, number, or nested collection of them, of the same shape on every rank.
            reduce_op: "mean", "sum", "max" or "min".
        """
        ranks = self.ranks
        return map_tensors(lambda tensor: ranks.all_reduce(tensor, reduce_op), _tensors(data))

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data on every rank.

        Args:
            data: weights-only-safe data: numbers, strings, tensors, and dicts, lists, tuples and
                sets of them.
            src: the rank to broadcast from.

        Raises:
            TypeError: it is not weights-only-safe data; says where.
        """
        return self.ranks.broadcast(data, src)

    def barrier(self, name: str = "") -> None:
        """Wait until every rank is here."""
        self.ranks.barrier(name)

    # -- models, optimizers, data

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        move_to_device: bool = True,
        compile: Compile = None,
    ) -> Any:
        """Prepare a model and its optimizers for the strategy.

        Args:
            module: a model; once for each of several.
            *optimizers: made from its parameters.
            move_to_device: move the parameters to this rank's device.
            compile: True: torch.compile of the model; or a dict of its arguments; None: as
                `step_options` says. See docs/compiling.md.

        Returns:
            The model, or (model, optimizer, ...) if optimizers were given, or if the strategy's
            engine makes one by its own config.

        Raises:
            ConfigurationError: the model was set up before, or an optimizer has none of its
                parameters.
        """
        strategy = self._runtime.launched_strategy()
        module = own_module(module)
        if isinstance(module, LiteModule):
            raise ConfigurationError(
                "setup() received a model that was set up before; call it once for each model"
            )
        check_setup(self.plan, optimizers)
        compilation = compilation_of_setup(self.plan, strategy, compile)
        with explained_device_errors(strategy, module, optimizers):
            prepared = prepare(
                strategy, module, optimizers, move_to_device=move_to_device, compilation=compilation
            )
        self._prepared.append(prepared)
        model = LiteModule(module, prepared, strategy)
        if not prepared.optimizers:
            return model
        wrapped = [wrap_optimizer(o, prepared, strategy) for o in prepared.optimizers]
        return (model, *wrapped)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers made from the parameters of models that were set up.

        Returns:
            The optimizer, or a tuple of them.
        """
        check_backward(self.plan)
        wrapped = []
        for optimizer in optimizers:
            prepared = prepared_of(optimizer, self._prepared)
            if optimizer not in prepared.optimizers:
                optimizer = self.strategy.setup_optimizer(prepared, optimizer)
                prepared.optimizers.append(optimizer)
                warn_of_lost_epsilon(self.strategy, optimizer)
            wrapped.append(wrap_optimizer(optimizer, prepared, self.strategy))
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def setup_dataloaders(
        self,
        *dataloaders: Any,
        use_distributed_sampler: bool = True,
        replace_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """Prepare data loaders: each rank reads its part, and batches come on the device.

        Handed to `save` and `load`, they go on in the middle of an epoch; see `LiteDataLoader`.

        Args:
            *dataloaders: one or several.
            use_distributed_sampler: divide the data between ranks; every rank gets as many
                samples, the first ones repeated if they do not divide evenly.
            replace_sampler: another name for `use_distributed_sampler`.
            move_to_device: move tensors to this rank's device.

        Returns:
            The loader, or a list of them.
        """
        index, count = self._runtime.launched_strategy().ranks.data_split
        rng_of = (self.strategy.accelerator, self.device)
        accelerator = self.strategy.accelerator
        moves = move_to_device and not accelerator.is_host
        move = accelerator.batch_mover(self.device) if moves else None
        wrapped: list[LiteDataLoader] = []
        for loader in dataloaders:
            if use_distributed_sampler and replace_sampler:
                loader = sharding.shard_loader(loader, index, count, even=True)
            name = "the data loader"
            if len(dataloaders) > 1:
                name += f" {len(wrapped)} of setup_dataloaders()"
            shard = (index, count)
            wrapped.append(
                LiteDataLoader(loader, move, name, self.global_rank, shard, rng_of=rng_of)
            )
        return wrapped[0] if len(wrapped) == 1 else wrapped

    # -- a step

    def backward(
        self, loss: Tensor, *args: Any, model: LiteModule | None = None, **kwargs: Any
    ) -> None:
        """Run backward from a loss, in place of `loss.backward()`.

        Args:
            loss: a scalar with a gradient.
            model: which model it is of; needed with several models under a strategy whose engine
                owns backward.
            *args, **kwargs: those of `Tensor.backward`.
        """
        prepared = model.prepared if model is not None else self._only_prepared()
        check_backward(self.plan)
        if self._runtime.raise_errors is not None:
            self._runtime.raise_errors()
        if self._weight != 1.0:
            loss = loss * self._weight
        try:
            self.strategy.backward(prepared, loss, *args, **kwargs)
        except RuntimeError as error:
            raise_explained(error, self.strategy, prepared)

    def _only_prepared(self) -> PreparedModel:
        if not self._prepared:
            raise ConfigurationError("backward() needs a model that was set up: call setup() first")
        return self._prepared[-1]

    def clip_gradients(
        self,
        module: LiteModule,
        optimizer: Optimizer,
        *,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters, between backward and step.

        Args:
            module, optimizer: as `setup` returned them.
            clip_val: the largest absolute value of an element.
            max_norm: the largest norm; give one of the two.
            norm_type: which norm.
            error_if_nonfinite: raise if the norm is NaN or infinite; not under a precision that
                scales the loss, where such a step is left out.

        Returns:
            The norm before clipping, if `max_norm` was given.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                "clip_gradients() expects either clip_val or max_norm, received clip_val="
                f"{clip_val!r} and max_norm={max_norm!r}"
            )
        if self.plan.capabilities.engine_clips:
            raise ConfigurationError(
                f"the strategy {self.plan.strategy.name!r} clips gradients itself: configure it "
                "there in place of calling clip_gradients()"
            )
        inner = optimizer.optimizer if isinstance(optimizer, LiteOptimizer) else optimizer
        precision = self.strategy.precision
        if precision.scales_loss:
            precision.unscale_gradients(inner)
            error_if_nonfinite = False
        clip = (
            GradientClip(clip_val, "value")
            if clip_val is not None
            else GradientClip(max_norm or 0.0, "norm", norm_type, error_if_nonfinite)
        )
        return self.strategy.clip_gradients(module.prepared, inner, clip)

    @contextmanager
    def no_backward_sync(self, module: LiteModule, *, enabled: bool = True) -> Iterator[None]:
        """Communicate no gradients in backward passes inside, to accumulate them first.

        Args:
            module: as `setup` returned it.
            enabled: False makes it do nothing, for `enabled=is_accumulating`.
        """
        held = self.strategy.no_sync(module.prepared) if enabled else None
        if held is None:
            yield
        else:
            with held:
                yield

    def join_uneven_inputs(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's batches; once they end, the last one again while others have more.

        For ranks with different numbers of batches: all take as many steps. What is repeated counts
        nothing and the others' batches for more, by a weight that `backward` multiplies the loss
        with, so that gradients are the mean over the ranks that have a batch. The ranks exchange a
        number before each batch; they must leave the loop together.

        Args:
            loader: this rank's batches.

        Raises:
            UserCodeError: it has no batch on this rank, and another rank has some.

        Example:
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> lite.launch()
            >>> [batch for batch in lite.join_uneven_inputs([1, 2, 3])]
            [1, 2, 3]
        """
        strategy = self._runtime.launched_strategy()
        if strategy.ranks.world_size == 1:
            yield from loader
            return
        uneven_inputs = UnevenInputs(
            "the data loader handed to join_uneven_inputs()",
            strategy.ranks,
            strategy=type(strategy).__name__,
            joins=True,
        )
        batches = iter(loader)
        try:
            while True:
                step, weights = uneven_inputs.next_step(list(islice(batches, 1)), 0)
                if not step:
                    return
                self._weight = 1.0 if weights is None else weights[0]
                yield step[0]
        finally:
            self._weight = 1.0

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's forward context, for code outside of a model's forward."""
        return self.strategy.precision.forward_context() or nullcontext()

    # -- state

    def save(self, path: PathLike | Mapping[str, Any], state: Any = None) -> None:
        """Save state to a file; the two arguments may come in either order.

        Called by every rank; rank 0 writes, and all return once the file is durable; with
        `async_save=True`, once the state is copied.

        Args:
            path: where to, a local path or a URL.
            state: a dict of models and optimizers (as `setup` returned them), data loaders (as
                `setup_dataloaders` returned them, with their place and the RNG states of every
                rank), objects with `state_dict()`, and weights-only-safe data.

        Raises:
            CheckpointContentError: something in it is not weights-only-safe data; says what.

        Example:
            >>> import tempfile
            >>> from torch.utils.data import DataLoader
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> lite.launch()
            >>> path = tempfile.mkdtemp() + "/third.ckpt"
            >>> read = []
            >>> batches = lite.setup_dataloaders(DataLoader(range(8), shuffle=True))
            >>> for batch in batches:
            ...     read.append(batch.item())
            ...     if len(read) == 3:
            ...         lite.save(path, {"batches": batches})
            >>> again = lite.setup_dataloaders(DataLoader(range(8), shuffle=True))
            >>> lite.load(path, {"batches": again})
            {}
            >>> [batch.item() for batch in again] == read[3:]
            True
        """
        if isinstance(state, (str, os.PathLike)):
            path, state = state, path
        if not isinstance(path, (str, os.PathLike)) or not isinstance(state, Mapping):
            raise ConfigurationError(
                "save() expects a path and a dict of state, received "
                f"{type(path).__name__} and {type(state).__name__}"
            )
        self._runtime.launched_strategy()
        self._runtime.checkpoint_writer.save(
            collect(self.strategy, state), paths.parse_user_path(path)
        )

    def load(
        self, path: PathLike, state: dict[str, Any] | None = None, *, strict: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint; every rank calls it.

        Args:
            path: where from, a local path or a URL.
            state: models, optimizers, data loaders and objects with `load_state_dict()` are
                filled, plain values are replaced in this dict; None: nothing is filled. With a data
                loader, RNG states are restored as well.
            strict: refuse a checkpoint that lacks an entry of `state`, or whose weights do not
                match the model's.

        Returns:
            What was not filled in; without `state`, everything.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: says what is
                wrong with it.
        """
        self._runtime.launched_strategy()
        checkpoint = self._runtime.checkpoint_writer.load(paths.parse_user_path(path))
        if state is not None:
            restore(self.strategy, checkpoint, state, path=path, strict=strict)
        checkpoint.pop(STRATEGY_STATE, None)
        return read_whole(checkpoint)

    # -- callbacks and loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values by their names to every logger, on rank 0.

        Raises:
            ConfigurationError: a value is no number, and no tensor of one element.
        """
        if self.is_global_zero:
            for logger in self._loggers:
                logger.log_metrics(numbers_of(metrics), step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                raise ConfigurationError(
                    f"call({hook_name!r}): {type(callback).__name__}.{hook_name} is a "
                    f"{type(method).__name__}; expected a method"
                )
            method(*args, **kwargs)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool = True) -> int:
        """Seed Python, NumPy and torch alike on every rank; see `stratagem.seed_everything`."""
        return seed_everything(seed, workers=workers)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return values as floats.

    Raises:
        ConfigurationError: one is no number, and no tensor of one element; names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = getattr(value, "shape", None)
            received = repr(value) if shape is None else f"one of shape {tuple(shape)}"
            raise ConfigurationError(
                f"log_dict: {name!r}: expected a number or a tensor of one element, received "
                f"{received}: log its mean, or each part by a name of its own"
            ) from error
    return numbers


def _tensors(data: Any) -> Any:
    return torch.tensor(data) if isinstance(data, (bool, int, float)) else data
