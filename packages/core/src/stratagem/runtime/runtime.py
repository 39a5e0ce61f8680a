"""Launched: a plan with its strategy, its processes, and what they do together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from stratagem.data.pytree import map_tensors, move_to_device
from stratagem.discovery.registry import get_registry
from stratagem.distributed.leave_group import fail_at_end
from stratagem.errors import ConfigurationError, PluginError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.components import Components
from stratagem.interfaces.contract_checks import check_overrides, check_strategy
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.ranks import Ranks, ReduceOp
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.environment import environment_of_request
from stratagem.launch.rank import at_end_of_rank, this_rank
from stratagem.launch.streams import open_standard_streams
from stratagem.launch.watch import run_as_rank
from stratagem.plan.plan import RunPlan, RunRequest
from stratagem.plan.resolution import resolve
from stratagem.plan.step_options import StepOptions
from stratagem.rng import inherit_rng, inherited_rng
from stratagem.runtime.checkpoint_writer import CheckpointWriter
from stratagem.runtime.ranked import Ranked
from stratagem.runtime.request import Devices, Plugin, sort_plugins


class Launched(Ranked):
    """What both front ends are made on: a plan, its strategy, and the processes.

    Args:
        accelerator, strategy, devices, num_nodes, precision, plugins, async_save:
            as `Lite` describes them.
        step_options: how the front end takes optimizer steps; None: the user's own loop does.

    Attributes:
        plan: what was chosen, and why.
        strategy: its ranks and device are there once processes are launched.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.
    """

    _made: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass's `run` launch the processes before it runs."""
        super().__init_subclass__(**kwargs)
        run = cls.__dict__.get("run")
        if run is not None:
            cls.run = _launching(run)  # type: ignore[attr-defined]

    def __init__(
        self,
        *,
        accelerator: str | Accelerator,
        strategy: str | Strategy,
        devices: Devices,
        num_nodes: int,
        precision: str | int | Precision,
        plugins: Plugin | Sequence[Plugin] | None,
        async_save: bool,
        step_options: StepOptions | None = None,
    ) -> None:
        ordinal, Launched._made = Launched._made, Launched._made + 1
        self.plan: RunPlan = resolve(
            RunRequest(
                accelerator=accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=num_nodes,
                environ=environment_of_request(ordinal),
                ordinal=ordinal,
                async_save=async_save,
                step_options=step_options,
                **sort_plugins(plugins, precision),
            ),
            get_registry(),
        )
        plan = self.plan
        self.strategy: Strategy = plan.strategy.build()
        check_strategy(self.strategy, plan.strategy.spec, Strategy)
        self.strategy.bind(
            Components(
                accelerator=plan.accelerator.build(),
                precision=plan.precision.build(),
                checkpoint_io=plan.checkpoint_io.build(),
                cluster_environment=plan.cluster_environment.build(),
                devices=plan.devices,
                num_nodes=plan.num_nodes,
                step=plan.request.step_options,
            )
        )
        self._launched = self._in_run = False
        self._raise_errors: Callable[[], None] | None = None
        """Raises what failed in the background, where something may run there."""

    # -- launching

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and set up their environment.

        Args:
            function: called as `function(lite, *args, **kwargs)` on every rank; None returns, and
                the script goes on on every rank.

        Returns:
            What the function returns on this rank.

        Raises:
            ConfigurationError: the launcher needs a function, and none was given.
            RankFailedError: another rank failed; shows its traceback.
        """
        open_standard_streams()
        if this_rank.is_launched and self.plan.runs_elsewhere and function is not None:
            # This process is a rank already: of a launch that this call is a part of.
            return run_as_rank(self._run_on_rank, function, self, *args, **kwargs)
        launcher = self.plan.launcher.build()
        check_overrides(type(launcher), Launcher)
        if function is None:
            if self.plan.runs_elsewhere:
                raise ConfigurationError(
                    f"the launcher {self.plan.launcher.name!r} runs a function in new processes, "
                    "so launch() needs one: pass it (lite.launch(main), with main(lite)), or put "
                    "the code into run() of a subclass"
                )
            return launcher.launch(self.plan, self._setup_environment)
        call = (function, self, *args)
        if self.plan.runs_elsewhere:
            return launcher.launch(
                self.plan, self._run_on_new_rank, inherited_rng(), *call, **kwargs
            )
        return launcher.launch(self.plan, self._run_on_rank, *call, **kwargs)

    def _run_on_new_rank(self, inherited: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run on a rank that draws what the launching process would draw, did it run this."""
        inherit_rng(inherited)
        return self._run_on_rank(*args, **kwargs)

    def _run_on_rank(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._setup_environment()
        result = function(*args, **kwargs)
        self.strategy.checkpoint_io.wait()
        return result

    def _setup_environment(self) -> None:
        if not self._launched:
            self.strategy.setup_environment()
            self._check_world_size()
            checkpoint_io = self.strategy.checkpoint_io
            checkpoint_io.setup(self.strategy.ranks, self.plan.strategy.name)
            if checkpoint_io.asynchronous:
                self._raise_errors = checkpoint_io.raise_errors
            self._launched = True
            at_end_of_rank(functools.partial(_teardown, weakref.ref(self.strategy)))

    def _check_world_size(self) -> None:
        """Refuse a strategy whose ranks are not those that were launched.

        Raises:
            PluginError: each process would train alone, on all of the data.
        """
        ranks, planned = self.strategy.ranks, self.plan.world_size
        if ranks.world_size != planned:
            raise PluginError(
                f"{type(self.strategy).__name__} was launched as {planned} rank(s), and its ranks "
                f"are {ranks.world_size}: its capabilities say one_process="
                f"{self.plan.capabilities.one_process}, and its make_ranks() returned something "
                "else; subclass ParallelStrategy for one process a device"
            )

    @property
    def is_launched(self) -> bool:
        """Whether this process is a rank, with its environment set up."""
        return self._launched

    def _launched_strategy(self) -> Strategy:
        if not self._launched and self.plan.world_size == 1 and not self.plan.runs_elsewhere:
            self.launch()  # nothing is started: this process is the only rank
        if not self._launched:
            raise ConfigurationError(
                "nothing was launched yet: call lite.launch() first, or put the code into a "
                "subclass's run() and call that"
            )
        return self.strategy

    # -- who and where

    @property
    def ranks(self) -> Ranks:
        """The processes that train together, as this one sees them."""
        return self.strategy.ranks

    @property
    def checkpoint_writer(self) -> CheckpointWriter:
        """What saves and loads checkpoints from all ranks together."""
        strategy = self.strategy
        return CheckpointWriter(
            strategy.ranks,
            strategy.checkpoint_io,
            reads_parts=strategy.capabilities.sharded_state,
        )

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._launched_strategy().device

    # -- devices

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which to build a model.

        Its parameters are made on the device, in the right dtype and, under a sharding
        strategy, sharded.

        Args:
            empty_init: whether first values may be left out, which other libraries do to save
                memory and time. Here they are as the constructor draws them in any case.
        """
        return self._init_context(self._launched_strategy().model_context())

    def init_tensor(self) -> AbstractContextManager[None]:
        """Return a context in which new tensors are on the device, in the right dtype."""
        return self._init_context(nullcontext())

    @contextmanager
    def _init_context(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.device)
            stack.enter_context(self.strategy.precision.init_context())
            stack.enter_context(context)
            yield

    def to_device(self, data: Any) -> Any:
        """Return a model, tensor or nested collection of tensors on this rank's device."""
        return move_to_device(data, self.device)

    # -- collectives

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
            data: plain data: numbers, strings, tensors, and dicts, lists, tuples and sets of them.
            src: the rank to broadcast from.

        Raises:
            TypeError: it is not plain data; says where.
        """
        return self.ranks.broadcast(data, src)

    def barrier(self, name: str = "") -> None:
        """Wait until every rank is here."""
        self.ranks.barrier(name)

    @contextmanager
    def rank_zero_first(self, *, local: bool = False) -> Iterator[None]:
        """Let rank 0 run the block before the others do.

        Args:
            local: rank 0 of each node.
        """
        rank = self.local_rank if local else self.global_rank
        if rank > 0:
            self.barrier("rank_zero_first")
        yield
        if rank == 0:
            self.barrier("rank_zero_first")
        self.barrier("rank_zero_first")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)


def _teardown(strategy: weakref.ref[Strategy]) -> None:
    """At the end of the process, release what a strategy holds, if it is still there."""
    alive = strategy()
    if alive is not None:
        try:
            alive.teardown()
        # Nobody catches it here: it would be printed as ignored, and the exit code would be 0.
        except Exception as error:
            fail_at_end(error, f"{type(alive).__name__}.teardown() failed after the run was done")


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `run` so that the outermost call launches the processes."""

    @functools.wraps(run)
    def launch_and_run(self: Launched, *args: Any, **kwargs: Any) -> Any:
        if self._in_run:
            return run(self, *args, **kwargs)
        self._in_run = True
        try:
            return self.launch(_run, *args, **kwargs)
        finally:
            self._in_run = False

    return launch_and_run


def _run(lite: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a subclass's `run`; a function of this module, so that it can be pickled."""
    return lite.run(*args, **kwargs)


def _tensors(data: Any) -> Any:
    return torch.tensor(data) if isinstance(data, (bool, int, float)) else data
