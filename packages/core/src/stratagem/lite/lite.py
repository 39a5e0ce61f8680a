"""Lite: your own training loop, with any strategy."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.compile import own_module
from stratagem.data import sharding
from stratagem.data.combined_loader import CombinedLoader
from stratagem.data.pytree import map_tensors, move_to_device
from stratagem.discovery.absent import find_or_explain
from stratagem.discovery.entry_points import is_ours
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.ranks import ReduceOp
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.process import print_hint_once
from stratagem.lite.dataloader import LiteDataLoader, Reading
from stratagem.lite.module import LiteModule
from stratagem.lite.state import STRATEGY_STATE, SetUpObjects, collect, restore
from stratagem.plan.components import is_zero
from stratagem.plan.step_options import GradientClip, StepOptions
from stratagem.rng import seed_everything
from stratagem.runtime.loss_factors import loss_factors
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
from stratagem.runtime.runtime import (
    Devices,
    FrontEnd,
    Plugin,
    Runtime,
    as_list,
    launch_arguments,
    public_call,
)
from stratagem.runtime.uneven_inputs import UnevenInputs
from stratagem.state.shards import read_whole
from stratagem.storage import paths

PathLike = str | os.PathLike[str]

_NOT_DIVIDED = (
    "several ranks train, and no loader of lite.setup_dataloaders() has yielded a batch: a loader "
    "that is not set up gives each rank the same samples. Pass it to setup_dataloaders(), with "
    "use_distributed_sampler=False if your own sampler divides the data"
)


class Lite(FrontEnd):
    """Gives a hand-written loop devices, processes, precision and checkpoints.

    Either subclass it, write the loop in `run` and call that; or make one, call `launch` and go on
    in the same script. One rank needs no `launch`.

    Args:
        accelerator: a name ("cpu", "gpu", ...), an Accelerator, or "auto".
        strategy: a name, a Strategy, or "auto".
        devices: a number of devices, a list of indices, -1 for all, or "auto"; None or 0: the CPU.
        num_nodes: number of machines.
        precision: a name ("32-true", "bf16-mixed", ...), 64, 32, 16, "bf16", or a Precision; None:
            "32-true".
        plugins: CheckpointIO, ClusterEnvironment, Launcher or Precision objects, or names of them.
        callbacks: objects with the methods that `call` calls.
        loggers: destinations of `log_dict`: Logger objects, or names such as "tensorboard".
        accumulate_grad_batches: batches per optimizer step, in blocks of `accumulate`.
        async_save: write checkpoints of any format while training continues.
        step_options: options of your steps for the strategy, such as
            `StepOptions(sync_batchnorm=True)`. Your own loop clips and accumulates.

    `stratagem run --accelerate-config FILE` sets `accelerator`, `precision` and
    `accumulate_grad_batches` if the script leaves them open.

    Attributes:
        plan: the chosen components, with reasons; `lite.plan.explain()` returns it as text.
        strategy: the strategy. Its ranks and device are known after the launch of processes.

    Raises:
        ConfigurationError: the request cannot be met; no process was started.

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

    @public_call
    def __init__(
        self,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        plugins: Plugin | Sequence[Plugin] | None = None,
        callbacks: object | Sequence[object] | None = None,
        loggers: object | Sequence[object] | None = None,
        *,
        accumulate_grad_batches: int | None = None,
        async_save: bool = False,
        step_options: StepOptions | None = None,
    ) -> None:
        defaults = launch_arguments()
        if accelerator == "auto":
            accelerator = defaults.get("accelerator", accelerator)
        if precision is None:
            precision = defaults.get("precision", "32-true")
        if accumulate_grad_batches is None:
            accumulate_grad_batches = defaults.get("accumulate_grad_batches", 1)
        if type(accumulate_grad_batches) is not int or accumulate_grad_batches < 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={accumulate_grad_batches!r}: expected a whole number of "
                "at least 1"
            )
        self._runtime = Runtime(
            accelerator=accelerator,
            strategy=strategy,
            devices=None if is_zero(devices) else devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            async_save=async_save,
            step_options=step_options,
        )
        self.plan = self._runtime.plan
        self.strategy: Strategy = self._runtime.strategy
        self._callbacks = as_list(callbacks)
        self._loggers = [
            get_registry().find("logger", one).spec.build() if isinstance(one, str) else one
            for one in as_list(loggers)
        ]
        self._prepared: list[PreparedModel] = []
        self._objects = SetUpObjects()
        self._reading = Reading()
        self._window = accumulate_grad_batches
        self._divisor = 1
        """Number by which `backward` divides the loss; above 1 within `accumulate`."""
        self._micro_batches = 0
        """Blocks of `accumulate` in this epoch."""
        self._weight = 1.0
        self._joins_uneven = False
        """Weight of the present batch's loss; see `join_uneven_inputs`."""
        own_run: Callable[..., Any] | None = getattr(type(self), "run", None)
        if own_run is not None:
            # `self.run(...)` launches; `super().run(...)` within it is an ordinary call.
            vars(self)["run"] = functools.partial(self.launch, own_run)

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and set up their environment.

        Args:
            function: called as `function(lite, *args, **kwargs)` on every rank; with None, the call
                returns on every rank, and the script continues there.

        Returns:
            The function's result on this rank.

        Raises:
            ConfigurationError: the launcher needs a function, and `function` is None.
            RankFailedError: another rank failed; shows its traceback.
        """
        if function is None:
            return self._runtime.launch()
        return self._runtime.launch(function, self, *args, **kwargs)

    # -- ranks and devices

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
            empty_init: whether to leave out the parameters' first values, for weights that are
                loaded next. No time is spent on them, and no random numbers are drawn.
        """
        return self._runtime.init_module(empty=bool(empty_init))

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Return a context in which tensors are created on the device, in the precision's dtype."""
        with self.device, self.strategy.precision.init_context():
            yield

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        """Return every rank's tensors: each of shape (world_size, *shape).

        Args:
            data: a tensor, number, or nested collection of them, of the same shape on every rank.
            sync_grads: let gradients flow through the operation.
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

    def gather_for_metrics(self, data: Any) -> Any:
        """Return the samples of every rank, on every rank, each sample once.

        Samples that the loader repeated to give all ranks as many are left out, and so are batches
        that `join_uneven_inputs` repeated. Samples of one loader come in the order of its sampler.
        Ranks that compute the same values (`Ranks.value_groups`) count once. Where each rank
        computes a part of a batch's values, pass these parts: all of them count.
        Call it with each batch, or once after the loop with an epoch's. This needs
        `stratagem-extras`.

        Args:
            data: tensors with samples in the first dimension, which may differ between ranks;
                lists of objects (weights-only-safe data), an object for each sample; and dicts,
                lists and tuples of them. Of a tensor without dimensions each rank's value returns.

        Raises:
            UserCodeError: the ranks' data differ in structure or in another dimension, or the data
                are not counted by sample and the loader repeated some.

        Example:
            >>> import torch
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> loader = lite.setup_dataloaders(torch.utils.data.DataLoader(range(3), 2))
            >>> [lite.gather_for_metrics(batch).tolist() for batch in loader]
            [[0, 1], [2]]
        """
        from stratagem.lite import gather_for_metrics

        samples = self._reading.samples()
        return gather_for_metrics(self.ranks, data, samples, is_repeated=not self._weight)

    def pad_across_processes(
        self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Return tensors padded in a dimension to the largest size of all ranks.

        This needs `stratagem-extras`.

        Args:
            data: a tensor, or a nested collection of tensors. A tensor without this dimension is
                returned unchanged.
            dim: the dimension.
            pad_index: the value of the padding.
            pad_first: put the padding before the data, not after them.

        Example:
            >>> import torch
            >>> from stratagem import Lite
            >>> Lite(accelerator="cpu").pad_across_processes(torch.ones(2, 3), dim=1).shape
            torch.Size([2, 3])
        """
        from stratagem.lite import pad_across_processes

        return pad_across_processes(self.ranks, data, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, data: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each rank its part of a list, tuple or tensor, one after the other.

        This needs `stratagem-extras`.

        Args:
            data: a list, tuple or tensor, or a dict of them with equal lengths.
            apply_padding: repeat the last element until all ranks have as many.

        Returns:
            A context that yields this rank's part; the first ranks may have one more.

        Example:
            >>> from stratagem import Lite
            >>> with Lite(accelerator="cpu").split_between_processes(["a", "b"]) as prompts:
            ...     prompts
            ['a', 'b']
        """
        from stratagem.lite import split_between_processes

        yield split_between_processes(self.ranks, data, apply_padding)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data on every rank.

        Args:
            data: weights-only-safe data: numbers, strings, tensors, and dicts, lists, tuples and
                sets of them.
            src: the rank to broadcast from.

        Raises:
            TypeError: on every rank, if the data are not weights-only-safe; names the place in the
                data.
        """
        return self.ranks.broadcast(data, src)

    def barrier(self, name: str = "") -> None:
        """Wait until every rank calls this method."""
        self.ranks.barrier(name)

    def rank_zero_first(self, *, local: bool = False) -> AbstractContextManager[None]:
        """Return a context; rank 0 runs its block before the other ranks.

        Args:
            local: let local rank 0 of each node run first, instead of global rank 0.

        Example:
            >>> from stratagem import Lite
            >>> with Lite(accelerator="cpu").rank_zero_first():
            ...     print("download")
            download
        """
        return self.ranks.rank_zero_first(local=local)

    # -- models, optimizers, data

    def setup(self, *objects: Any, move_to_device: bool = True, compile: Compile = None) -> Any:
        """Prepare models, optimizers, schedulers and data loaders for the strategy, in any order.

        A scheduler that is set up steps when its optimizer does: within `accumulate`, at the end of
        a window. The length of a scheduler that is set up together with loaders was computed before
        their data were divided between ranks. Each `step` then makes one scheduler step per part.

        Args:
            *objects: models, optimizers made from their parameters, learning rate schedulers, data
                loaders, and objects with `state_dict()` and `load_state_dict()`, which `save_state`
                then saves; None stays None.
            move_to_device: move parameters and batches to this rank's device.
            compile: True: torch.compile of the models; or a dict of its arguments; None: the value
                of `step_options`. See docs/guides/compiling.md.

        Returns:
            The object, or a tuple of them in the order of the arguments. An optimizer that the
            strategy's engine makes by its own config follows its model.

        Raises:
            ConfigurationError: a model was set up before, an optimizer has no parameter of a model,
                or an object is of another kind.

        Example:
            >>> import torch
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2))
            >>> loader, model, optimizer = lite.setup(loader, model, optimizer)
            >>> len(loader)
            8
        """
        if not objects:
            raise ConfigurationError("setup() received nothing; expected a model")
        is_model = isinstance(objects[0], nn.Module)
        if is_model and all(isinstance(one, Optimizer) for one in objects[1:]):
            return self._setup_model(*objects, move_to_device=move_to_device, compile=compile)
        from stratagem.lite.objects import setup_objects

        return setup_objects(self, objects, move_to_device=move_to_device, compile=compile)

    def _setup_model(
        self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool, compile: Compile
    ) -> Any:
        strategy = self._runtime.launched_strategy()
        module = own_module(module)
        if isinstance(module, LiteModule):
            raise ConfigurationError(
                "setup() received a model that was set up before; call it once for each model"
            )
        check_setup(self.plan, optimizers)
        compilation = compilation_of_setup(self.plan, strategy, compile)
        try:
            prepared = prepare(
                strategy, module, optimizers, move_to_device=move_to_device, compilation=compilation
            )
        except RuntimeError as error:
            from stratagem.runtime.device_errors import explain_device_error  # after failures only

            explain_device_error(error, strategy, module, optimizers)
            raise
        self._prepared.append(prepared)
        model = LiteModule(module, prepared, strategy)
        self._objects.add("model", model)
        if not prepared.optimizers:
            return model
        wrapped = [wrap_optimizer(o, prepared, strategy) for o in prepared.optimizers]
        self._objects.add("optimizer", *wrapped)
        return (model, *wrapped)

    def setup_module(
        self, module: nn.Module, *, move_to_device: bool = True, compile: Compile = None
    ) -> LiteModule:
        """Prepare a model whose optimizers follow by `setup_optimizers`; see `setup`."""
        model = self.setup(module, move_to_device=move_to_device, compile=compile)
        prepared: LiteModule = model[0] if isinstance(model, tuple) else model
        return prepared

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers made from the parameters of models that were set up.

        Returns:
            The optimizer, or a tuple of them.
        """
        check_backward(self.plan, by_step=True)
        wrapped = []
        for optimizer in optimizers:
            prepared = prepared_of(optimizer, self._prepared)
            if optimizer not in prepared.optimizers:
                optimizer = self.strategy.setup_optimizer(prepared, optimizer)
                prepared.optimizers.append(optimizer)
                prepared.clear_gradients.append(prepared.gradient_clearer(optimizer))
                warn_of_lost_epsilon(self.strategy, optimizer)
            wrapped.append(wrap_optimizer(optimizer, prepared, self.strategy))
        self._objects.add("optimizer", *wrapped)
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def setup_dataloaders(
        self,
        *dataloaders: Any,
        use_distributed_sampler: bool = True,
        replace_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """Prepare data loaders: each rank reads its part, and batches come on the device.

        With `save` and `load`, loaders resume in the middle of an epoch; see `LiteDataLoader`.

        Args:
            *dataloaders: the data loaders.
            use_distributed_sampler: divide the data between ranks. Every rank gets the same number
                of samples; if they do not divide evenly, the first samples are repeated.
            replace_sampler: another name for `use_distributed_sampler`.
            move_to_device: move tensors to this rank's device.

        Returns:
            The loader, or a list of them.
        """
        shard = self._runtime.launched_strategy().ranks.data_split
        rng_of = (self.strategy.accelerator, self.device)
        accelerator = self.strategy.accelerator
        moves = move_to_device and not accelerator.is_host
        move = accelerator.batch_mover(self.device) if moves else None
        wrapped: list[LiteDataLoader] = []
        for loader in dataloaders:
            if use_distributed_sampler and replace_sampler:
                loader = self._shard_loader(loader, *shard)
            name = "the data loader"
            if len(dataloaders) > 1:
                name += f" {len(wrapped)} of setup_dataloaders()"
            options: Any = {"rng_of": rng_of, "reading": self._reading}
            wrapped.append(LiteDataLoader(loader, move, name, self.global_rank, shard, **options))
        self._objects.add("dataloader", *wrapped)
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _shard_loader(self, loader: Any, index: int, count: int) -> Any:
        if isinstance(loader, CombinedLoader):
            return loader.map(lambda one: self._shard_loader(one, index, count))
        return sharding.shard_loader(loader, index, count, even=True)

    # -- a step

    def backward(
        self, loss: Tensor, *args: Any, model: LiteModule | None = None, **kwargs: Any
    ) -> None:
        """Run backward from a loss, instead of `loss.backward()`.

        If several ranks train and no loader of `setup_dataloaders` has yielded a batch, a hint says
        once that each rank may read the same data.

        Args:
            loss: a scalar with a gradient.
            model: the model of the loss. Required with several models if the strategy is from a
                plugin and overrides `backward`, such as DeepSpeed's.
            *args, **kwargs: the arguments of `Tensor.backward`.

        Raises:
            ConfigurationError: the loss is no tensor, no model was set up, or the model must be
                named.
        """
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"backward() expects the loss as a tensor, received a {type(loss).__name__}"
            )
        prepared = model.prepared if model is not None else self._only_prepared()
        self._check_before_backward()
        if self._weight != 1.0:
            loss = loss * self._weight
        if self._divisor > 1:
            loss = loss / self._divisor
        try:
            self.strategy.backward(prepared, loss, *args, **kwargs)
        except RuntimeError as error:
            from stratagem.runtime.device_errors import raise_explained  # after failures only

            raise_explained(error, self.strategy, prepared)

    def _check_before_backward(self, *, by_step: bool = False) -> None:
        check_backward(self.plan, by_step=by_step)
        if self._runtime.raise_errors is not None:
            self._runtime.raise_errors()
        if self._reading.latest is None and self.is_global_zero and self.ranks.data_split[1] > 1:
            print_hint_once(_NOT_DIVIDED)

    def step(
        self,
        model: LiteModule,
        micro_batches: Sequence[Any],
        loss: Callable[[Any], Tensor | None],
        *,
        weights: Sequence[float] | None = None,
        clip_val: float | None = None,
        max_norm: float | None = None,
    ) -> Tensor | None:
        """Take one optimizer step over micro-batches; called on every rank.

        Runs forward and backward of each micro-batch, clips, steps the optimizer of the model, and
        clears the gradients. Ranks communicate gradients once. The strategy decides the order, so
        that a step works with strategies that interleave the micro-batches, too.

        Args:
            model: a model that was set up with one optimizer.
            micro_batches: the micro-batches of this rank, at least one, and as many on each rank.
            loss: called with each micro-batch; returns a scalar, or None to skip the micro-batch.
            weights: for each micro-batch, the number of elements that its loss is a mean of, such
                as its valid tokens: the step then follows the mean over all elements of all ranks;
                see `loss_factors`. With None, losses are averaged over micro-batches and ranks.
            clip_val, max_norm: see `clip_gradients`. Pass at most one.

        Returns:
            The mean of this rank's losses, as the step weighs them; None if all were skipped.

        Raises:
            ConfigurationError: the model has several optimizers or none; there is no micro-batch;
                or `weights` has another length. Also within `accumulate`, which holds steps, and
                for several micro-batches within `join_uneven_inputs`.

        Example:
            >>> import torch
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> model = torch.nn.Linear(1, 1)
            >>> model, _ = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> def loss(batch):
            ...     return model(batch).square().mean()
            >>> batches = [torch.ones(4, 1), torch.zeros(2, 1)]
            >>> first = lite.step(model, batches, loss, weights=[4, 2], max_norm=1.0)
            >>> bool(lite.step(model, batches, loss, weights=[4, 2]) < first)
            True
        """
        prepared, count = model.prepared, len(micro_batches)
        if len(prepared.optimizers) != 1:
            raise ConfigurationError(
                f"step() takes a model that was set up with one optimizer, received one with "
                f"{len(prepared.optimizers)}: call lite.setup(model, optimizer), or call backward "
                "and the optimizers' step yourself"
            )
        if not count or (weights is not None and len(weights) != count):
            raise ConfigurationError(
                f"step() received {count} micro-batch(es) and weights={weights}; expected at least "
                "one micro-batch, and a weight for each, or weights=None"
            )
        if self._divisor > 1:
            raise ConfigurationError(
                "step() within lite.accumulate(), which holds optimizer steps: pass the batches of "
                "the window to step() together, outside of the block"
            )
        self._check_before_backward(by_step=True)
        clips = clip_val is not None or max_norm is not None
        clip = self._gradient_clip(clip_val, max_norm) if clips else None
        if self._joins_uneven and count > 1:
            raise ConfigurationError(
                f"step() within lite.join_uneven_inputs() received {count} micro-batches, and each "
                "batch of that loop may have another weight: pass one micro-batch to each step(), "
                "or a loader of setup_dataloaders(), which gives ranks equal numbers of batches"
            )
        factors = None
        if weights is not None:
            own = weights if self._weight else [0.0]  # a repeated batch has no elements
            factors = [count * factor for factor in self.loss_factors(own)]
        elif self._weight != 1.0:
            factors = [self._weight] * count
        from stratagem.lite.step import LossStep  # not every loop needs it

        step = LossStep(loss, factors, clip)
        try:
            self.strategy.train_step(prepared, step, micro_batches)
        except RuntimeError as error:
            from stratagem.runtime.device_errors import raise_explained  # after failures only

            raise_explained(error, self.strategy, prepared)
        return torch.stack(step.losses).sum() / count if step.losses else None

    def _only_prepared(self) -> PreparedModel:
        if not self._prepared:
            raise ConfigurationError("backward() needs a model that was set up: call setup() first")
        # Our own strategies treat all models alike in backward.
        if len(self._prepared) > 1 and not is_ours(type(self.strategy).backward.__module__):
            raise ConfigurationError(
                f"backward(loss) with {len(self._prepared)} models: the strategy "
                f"{self.plan.strategy.name!r} overrides backward, which reduces the gradients of "
                "one model. Name it: lite.backward(loss, model=model)"
            )
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

        Within `accumulate`, only the block that steps clips.

        Args:
            module, optimizer: the model and the optimizer, as returned by `setup`.
            clip_val: the largest absolute value of an element.
            max_norm: the largest norm. Pass either `clip_val` or `max_norm`.
            norm_type: the type of the norm.
            error_if_nonfinite: raise an error if the norm is NaN or infinite. A precision that
                scales the loss skips such a step instead.

        Returns:
            The norm before clipping, if `max_norm` was given.
        """
        clip = self._gradient_clip(clip_val, max_norm, norm_type, error_if_nonfinite)
        if isinstance(optimizer, LiteOptimizer) and optimizer.is_held:
            return None
        inner = optimizer.optimizer if isinstance(optimizer, LiteOptimizer) else optimizer
        if self.strategy.precision.scales_loss:
            self.strategy.precision.unscale_gradients(inner)
        return self.strategy.clip_gradients(module.prepared, inner, clip)

    def _gradient_clip(
        self,
        clip_val: float | None,
        max_norm: float | None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> GradientClip:
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                f"expected either clip_val or max_norm, received clip_val={clip_val!r} and "
                f"max_norm={max_norm!r}"
            )
        if self.plan.capabilities.engine_clips:
            raise ConfigurationError(
                f"the strategy {self.plan.strategy.name!r} clips gradients itself: configure it "
                "there in place of calling clip_gradients()"
            )
        if clip_val is not None:
            return GradientClip(clip_val, "value")
        # A scaled step whose gradients overflow is skipped.
        error_if_nonfinite &= not self.strategy.precision.scales_loss
        return GradientClip(max_norm or 0.0, "norm", norm_type, error_if_nonfinite)

    def loss_factors(self, weights: Sequence[float]) -> list[float | Tensor]:
        """Return factors that make a step exact if its losses are means over different numbers.

        Multiply each loss of the step by its factor before `backward`, and do not divide it by the
        number of micro-batches. The step then follows the gradient of the mean over all elements of
        all micro-batches and ranks: `factor = weight * number of value groups / sum of the weights
        of these groups` (`Ranks.value_groups`; on one axis of data, each rank is one). Called on
        every rank before each step; ranks exchange one number.

        Args:
            weights: for each micro-batch of this rank in the step, the number of elements that its
                loss is a mean of, such as its valid tokens.

        Returns:
            The factors: numbers on one device, else tensors on the device. A weight of 0 has the
            factor 0.0. A mean of no elements is NaN: use `loss.nan_to_num() * factor` for such
            losses.

        Raises:
            ConfigurationError: a weight is negative, infinite or NaN.

        Example:
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu", devices=1)
            >>> lite.launch()
            >>> lite.loss_factors([6, 2])
            [0.75, 0.25]
        """
        numbers = [float(weight) for weight in weights]
        if not all(0 <= number < math.inf for number in numbers):
            raise ConfigurationError(
                f"weights={numbers}: expected finite numbers of at least 0, such as the numbers of "
                "elements that the losses are means of"
            )
        return loss_factors(self.ranks, numbers)

    def no_backward_sync(
        self, module: LiteModule, *, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Disable gradient communication in backward passes within the context, for accumulation.

        Args:
            module: the model, as returned by `setup`.
            enabled: False: the context has no effect, for `enabled=is_accumulating`.
        """
        held = self.strategy.no_sync(module.prepared) if enabled else None
        return held or nullcontext()

    def accumulate(self, *models: LiteModule) -> AbstractContextManager[bool]:
        """Take an optimizer step for every `accumulate_grad_batches` batches of a loop.

        In the block, `backward` divides the loss by that number. Until the last block of a window,
        gradients are not communicated, and `step` and `zero_grad` of optimizers and `step` of
        schedulers that were set up do nothing. The last batch of a loader also ends a window,
        unless the loader reads an IterableDataset; the divisor is unchanged.

        Args:
            *models: the models, as returned by `setup`.

        Returns:
            A context that yields whether this block ends a window.

        Example:
            >>> import torch
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu", accumulate_grad_batches=2)
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.ones(3, 2))
            >>> model, optimizer, loader = lite.setup(model, optimizer, loader)
            >>> for batch in loader:
            ...     with lite.accumulate(model) as is_last:
            ...         lite.backward(model(batch).sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     print(is_last)
            False
            True
            True
        """
        from stratagem.lite.objects import accumulate

        return accumulate(self, models)

    def join_uneven_inputs(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's batches; repeat the last batch while other ranks have more.

        Ranks with different numbers of batches then take the same number of steps. In a step with
        repeated batches, `backward` multiplies the loss by a weight: 0 for a repeated batch, and
        more than 1 for other batches. Gradients are therefore the mean over the ranks that have a
        batch. The ranks exchange a number before each batch, and must leave the loop together.

        Args:
            loader: this rank's batches.

        Raises:
            UserCodeError: the loader has no batch on this rank, but has batches on another rank.

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
        self._joins_uneven = True
        try:
            while True:
                step, weights = uneven_inputs.next_step(list(islice(batches, 1)), 0)
                if not step:
                    return
                self._weight = 1.0 if weights is None else weights[0]
                yield step[0]
        finally:
            self._weight, self._joins_uneven = 1.0, False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's forward context, for code outside of a model's forward."""
        return self.strategy.precision.forward_context() or nullcontext()

    # -- state

    def save(self, path: PathLike | Mapping[str, Any], state: Any = None) -> None:
        """Save state to a file; the two arguments may come in either order.

        Every rank calls it, and rank 0 writes. It returns when the file is durable; with
        `async_save=True`, when the state is copied.

        Args:
            path: the file to write, a local path or a URL.
            state: a dict of models and optimizers (as `setup` returned them), data loaders (as
                `setup_dataloaders` returned them, with their place and the RNG states of every
                rank), objects with `state_dict()`, and weights-only-safe data.

        Raises:
            CheckpointContentError: an object in `state` is not weights-only-safe; names the object.

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
            path: the file to read, a local path or a URL.
            state: a dict. Its models, optimizers, data loaders and objects with `load_state_dict()`
                are restored, and its plain values are replaced; None: no object is restored. With a
                data loader, RNG states are restored too.
            strict: raise if the checkpoint lacks an entry of `state`, or if its weights do not
                match the model.

        Returns:
            The entries that were not restored; without `state`, all entries.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: the checkpoint
                is missing, damaged, or does not match `state`.
            ConfigurationError: `state` is no dict.
        """
        if state is not None and not isinstance(state, dict):
            raise ConfigurationError(
                f"load() expects a path and a dict of state, received a {type(state).__name__}: "
                'lite.load(path, {"model": model})'
            )
        self._runtime.launched_strategy()
        checkpoint = self._runtime.checkpoint_writer.load(paths.parse_user_path(path))
        if state is not None:
            restore(self.strategy, checkpoint, state, path=path, strict=strict)
        checkpoint.pop(STRATEGY_STATE, None)
        return read_whole(checkpoint)

    def load_weights(self, model: LiteModule, weights: Any) -> None:
        """Load a model from a folder of safetensors; every rank calls it, and reads its shards.

        This needs `stratagem-extras`.

        Args:
            model: a model that `setup` returned.
            weights: the folder, in Hugging Face's layout, or a `PretrainedWeights`.

        Raises:
            CheckpointMismatchError: names or shapes differ; nothing was loaded.
        """
        from stratagem.checkpoint import PretrainedWeights

        PretrainedWeights.of(weights).load(self.strategy, model.prepared)

    def save_state(self, folder: PathLike) -> None:
        """Save everything that was set up, and the RNG states of every rank, into a folder.

        It saves models, optimizers, schedulers and other objects passed to `setup`, data loaders
        with their position, and the position in a window of `accumulate`. Every rank calls it.

        Args:
            folder: a local path or a URL; `save_state` writes the file "state.ckpt" in it.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from stratagem import Lite
            >>> lite = Lite(accelerator="cpu")
            >>> folder = tempfile.mkdtemp()
            >>> model = lite.setup(torch.nn.Linear(1, 1))
            >>> lite.save_state(folder)
            >>> before = model.weight.item()
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> lite.load_state(folder)
            >>> model.weight.item() == before
            True
        """
        from stratagem.lite.objects import save_state

        save_state(self, folder)

    def load_state(self, folder: PathLike) -> None:
        """Load a state saved by `save_state` into the objects set up in the same order.

        The next iteration over a loader continues with the next batch.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: the checkpoint
                is missing, damaged, or of other objects.
        """
        from stratagem.lite.objects import load_state

        load_state(self, folder)

    # -- callbacks and loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return next(iter(self.loggers), None)

    def log(self, name: str, value: Any = None, step: int | None = None) -> None:
        """Write a value to every logger, on rank 0.

        Raises:
            ConfigurationError: `name` is a dict, or the value is no number.
        """
        if not isinstance(name, str):
            raise ConfigurationError(
                f"log() expects a name and a value, received a {type(name).__name__}: use "
                "lite.log_dict(values, step) for a dict"
            )
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values by their names to every logger, on rank 0.

        Without a logger no values are written, and a hint is printed once.

        Raises:
            ConfigurationError: a value is neither a number nor a tensor of one element.
        """
        if self.is_global_zero:
            from stratagem.lite.objects import numbers_of

            for logger in self.loggers:
                logger.log_metrics(numbers_of(metrics), step)
            if not self.loggers:
                print_hint_once(
                    "Lite has no logger, so that log and log_dict write nothing: pass one, as in "
                    "Lite(loggers='csv')"
                )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters to every logger, on rank 0.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from stratagem import Lite
            >>> from stratagem.loggers import CSVLogger
            >>> logger = CSVLogger(tempfile.mkdtemp())
            >>> Lite(accelerator="cpu", loggers=logger).log_hyperparams({"lr": 0.1})
            >>> (Path(logger.log_dir) / "hparams.json").read_text().split()
            ['{', '"lr":', '0.1', '}']
        """
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_hyperparams(params)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has this method."""
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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            counterpart = counterparts_of_accelerate().get(name)
            if counterpart is None:
                return find_or_explain(self, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}. {counterpart} "
                "(docs/start/from-accelerate.md)",
                name=name,
                obj=self,
            )

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool = True) -> int:
        """Seed Python, NumPy and torch alike on every rank; see `stratagem.seed_everything`."""
        return seed_everything(seed, workers=workers)


def _tensors(data: Any) -> Any:
    return torch.tensor(data) if isinstance(data, (bool, int, float)) else data


@functools.cache
def counterparts_of_accelerate() -> dict[str, str]:
    """Return the counterparts in Lite of Accelerate's public names that Lite does not have."""
    lines = Path(__file__).with_name("accelerate_names.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)
