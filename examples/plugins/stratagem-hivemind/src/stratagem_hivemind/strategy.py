"""HivemindStrategy: a peer that trains with others, which come and go."""

from __future__ import annotations

import concurrent.futures
import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hivemind
import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.strategies import PreparedModel, SingleDeviceStrategy, TrainStep
from stratagem_hivemind.plugin import HIVEMIND

# hivemind itself gives its daemon 15 seconds.
SECONDS_TO_START = 60.0
STARTS = 2


class HivemindStrategy(SingleDeviceStrategy):
    """One peer. Peers gather gradients of `target_batch_size` samples together, then all step.

    A peer that joins takes weights and optimizer state from the others. `global_step` counts the
    steps that peers have taken together, hivemind's epochs, and is the same on all; a batch after
    which they have not gathered enough is trained on, and takes no step.

    Args:
        target_batch_size: samples that all peers gather for a step.
        run_id: the name of the run; peers with the same one train together.
        batch_size: samples in a batch of this peer; None: what the Trainer's loader says.
        initial_peers: addresses of peers that are there already, as `visible_peers` lists them.
        host_maddrs: where this peer listens, such as "/ip4/0.0.0.0/tcp/0"; None: on loopback.
        scheduler_fn: makes an LR scheduler, which is stepped after each of the peers' steps.
        matchmaking_time: seconds to wait for others when peers average.
        averaging_timeout: seconds after which averaging is given up.
        delay_state_averaging, delay_optimizer_step, delay_grad_averaging, offload_optimizer,
            reuse_grad_buffers, verbose, averager_opts: see `hivemind.Optimizer`.
        tracker_opts: of hivemind's progress tracker: how often this peer looks at the others.
        **components: see `SingleDeviceStrategy`.

    Raises:
        ConfigurationError: an option of hivemind that it takes only where it makes the optimizer,
            or no batch size.
    """

    capabilities = HIVEMIND

    def __init__(
        self,
        *,
        target_batch_size: int,
        run_id: str = "stratagem_run",
        batch_size: int | None = None,
        initial_peers: Sequence[str] | str = (),
        host_maddrs: Sequence[str] | None = None,
        scheduler_fn: Callable[[Optimizer], Any] | None = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        verbose: bool = False,
        averager_opts: dict[str, Any] | None = None,
        tracker_opts: dict[str, Any] | None = None,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        refused = {
            "delay_optimizer_step": delay_optimizer_step,
            "delay_grad_averaging": delay_grad_averaging,
            "offload_optimizer": offload_optimizer,
            "reuse_grad_buffers": reuse_grad_buffers,
        }
        for name, given in refused.items():
            if given:
                raise ConfigurationError(
                    f"{name}=True: hivemind would make the optimizer and keep gradients itself; "
                    "here your Module makes the one and the Trainer clears the others: leave it out"
                )
        self.target_batch_size = target_batch_size
        self.batch_size = batch_size
        self.initial_peers = (
            initial_peers.split(",") if isinstance(initial_peers, str) else list(initial_peers)
        )
        self.host_maddrs = list(host_maddrs or ["/ip4/127.0.0.1/tcp/0"])
        self.options: dict[str, Any] = {
            "run_id": run_id,
            "target_batch_size": target_batch_size,
            "scheduler": scheduler_fn,
            "matchmaking_time": matchmaking_time,
            "averaging_timeout": averaging_timeout,
            "delay_state_averaging": delay_state_averaging,
            "verbose": verbose,
            "averager_opts": {"request_timeout": matchmaking_time / 2, **(averager_opts or {})},
            "tracker_opts": tracker_opts,
        }
        self._dht: Any = None
        self._shared: dict[Optimizer, Any] = {}
        """hivemind's optimizer around each of the user's, once peers share it."""
        self._groups: dict[Optimizer, int] = {}
        """How many groups of parameters each of them had then."""
        self._idle: dict[Optimizer, concurrent.futures.ThreadPoolExecutor] = {}
        self._micro_batches = 1
        self._epochs: list[int] = []
        """hivemind's counts, of a checkpoint that was loaded before peers were met."""

    @property
    def visible_peers(self) -> list[str]:
        """Addresses of this peer, which others pass as `initial_peers`."""
        return [str(address) for address in self._meet().get_visible_maddrs()]

    def _meet(self) -> Any:
        """Return this peer's part of the hash table in which peers find one another."""
        if self._dht is None:
            self._dht = _start_table(self.initial_peers, self.host_maddrs)
        return self._dht

    def set_batch_size(self, batch_size: int | None) -> None:
        """Learn the batch size from the Trainer's loader."""
        self.batch_size = self.batch_size or batch_size

    def _share(self, optimizer: Optimizer) -> Any:
        """Return hivemind's optimizer around one of the user's, which averages with peers."""
        if optimizer not in self._shared:
            if self.batch_size is None:
                raise ConfigurationError(
                    "hivemind counts samples, and the loader does not say how many a batch has: "
                    "pass HivemindStrategy(batch_size=...)"
                )
            # Optimizers are averaged each with its own peers.
            number = len(self._shared)
            with _as_it_was(optimizer):
                shared = hivemind.Optimizer(
                    dht=self._meet(),
                    optimizer=optimizer,
                    batch_size_per_step=self.batch_size,
                    **{**self.options, "run_id": f"{self.options['run_id']}_{number}"},
                )
            if number < len(self._epochs):
                _count_from(shared, self._epochs[number])
            self._shared[optimizer] = shared
            self._groups[optimizer] = len(optimizer.param_groups)
            self._idle[optimizer] = _end_with_program(shared.tracker)
        return self._shared[optimizer]

    def adopt_peer_state(
        self, prepared: PreparedModel, checkpoint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Take weights and optimizer state from peers that are ahead, and their count of steps."""
        ahead = 0
        for optimizer in prepared.optimizers:
            shared = self._share(optimizer)
            shared.tracker.fetched_global_progress_this_epoch.wait(
                self.options["averaging_timeout"]
            )
            if shared.local_epoch < shared.tracker.global_epoch:
                shared.load_state_from_peers()
                ahead = shared.local_epoch
        if not ahead:
            return None
        joined = checkpoint()
        joined["global_step"] = joined["progress"]["global_step"] = ahead
        return joined

    # -- a step

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Run a step over so many samples of this peer."""
        self._micro_batches = len(micro_batches)
        super().train_step(prepared, step, micro_batches)

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Hand this peer's gradients over; all step if there are enough of them."""
        if closure is not None:
            raise ConfigurationError(
                "optimizer.step(closure): hivemind averages gradients with peers first, and then "
                f"steps {type(optimizer).__name__} without the closure: compute the loss and its "
                "gradients before, and call optimizer.step()"
            )
        shared = self._share(optimizer)
        if len(optimizer.param_groups) != self._groups[optimizer]:
            raise ConfigurationError(
                "add_param_group: peers agreed on the parameters when they met, so hivemind takes "
                "no others: give the optimizer all parameter groups in configure_optimizers"
            )
        _check_trained(prepared, optimizer)
        before = shared.local_epoch
        assert self.batch_size is not None
        result = shared.step(batch_size=self.batch_size * self._micro_batches)
        self.precision.step_was_skipped = shared.local_epoch == before
        return result

    # -- state and end

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return hivemind's counts of steps."""
        epochs = [shared.local_epoch for shared in self._shared.values()] or self._epochs
        return {"epochs": epochs} if epochs else {}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Count on from a checkpoint."""
        self._epochs = list(state["epochs"])
        for shared, epoch in zip(self._shared.values(), self._epochs, strict=False):
            _count_from(shared, epoch)

    def end_training(self, prepared: PreparedModel) -> None:
        """Take leave of the other peers."""
        self._leave(prepared.optimizers)

    def release(self, prepared: PreparedModel) -> None:
        """Take leave of the other peers."""
        self._leave(prepared.optimizers)

    def teardown(self) -> None:
        """Take leave of the other peers, and of the table in which they are found."""
        self._leave(list(self._shared))
        super().teardown()

    def _leave(self, optimizers: Sequence[Optimizer]) -> None:
        self._epochs = [shared.local_epoch for shared in self._shared.values()] or self._epochs
        for optimizer in optimizers:
            shared = self._shared.pop(optimizer, None)
            self._groups.pop(optimizer, None)
            if shared is not None:
                shared.shutdown()
                self._idle.pop(optimizer).shutdown()
        if self._dht is not None and not self._shared:
            self._dht.shutdown()
            self._dht = None


def _start_table(initial_peers: list[str], host_maddrs: list[str]) -> Any:
    """Start a peer's part of the hash table, and return it once it serves.

    It is a fork of this process, and a fork of a process with threads may stand still before it
    does anything. hivemind would wait for it without end; here another one takes its place.

    Raises:
        RuntimeError: none serves.
    """
    for _ in range(STARTS):
        table = hivemind.DHT(start=False, initial_peers=initial_peers, host_maddrs=host_maddrs)
        try:
            table.run_in_background(timeout=SECONDS_TO_START)
        except concurrent.futures.TimeoutError:
            table.kill()
            table.join()
        else:
            return table
    raise RuntimeError(
        f"hivemind's hash table did not serve within {SECONDS_TO_START:g} seconds, in each of "
        f"{STARTS} processes: see whether this machine is overloaded, and whether "
        f"initial_peers={initial_peers} can be reached from it"
    )


def _check_trained(prepared: PreparedModel, optimizer: Optimizer) -> None:
    """Refuse frozen parameters, which hivemind would give gradients of zero.

    Raises:
        ConfigurationError: names one of them.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in prepared.original.named_parameters():
        if id(parameter) in held and not parameter.requires_grad:
            raise ConfigurationError(
                f"{name!r} has requires_grad=False and is in the optimizer, where hivemind gives "
                "it gradients of zero, so that momentum and weight decay move it: leave it out of "
                "the optimizer in configure_optimizers"
            )


def _end_with_program(tracker: Any) -> concurrent.futures.ThreadPoolExecutor:
    """Let a tracker end where an exception ends the program; return what to shut down before.

    Python waits for the threads of all executors, and so for the tracker's, before it calls what
    was registered for the end, such as `teardown`. To an idle one it says so.
    """
    idle = concurrent.futures.ThreadPoolExecutor(1)
    told = idle.submit(threading.current_thread).result()

    def end() -> None:
        told.join()
        if not tracker.shutdown_triggered.is_set():
            tracker.shutdown(timeout=1.0)

    threading.Thread(target=end, daemon=True).start()
    return idle


def _count_from(shared: Any, epoch: int) -> None:
    shared.state_averager.local_epoch = epoch
    with shared.tracker.pause_updates():
        shared.tracker.update_epoch(epoch)


@contextmanager
def _as_it_was(optimizer: Optimizer) -> Iterator[None]:
    """Put back weights and state of an optimizer, in place.

    hivemind steps it once with gradients of zero, for its state to be there: weight decay and
    momentum would move the weights, and Adam would count a step.
    """
    weights = [
        (parameter, parameter.detach().clone())
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    states = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    yield
    with torch.no_grad():
        for parameter, before in weights:
            parameter.copy_(before)
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                known = states.get(parameter, {}).get(name)
                if isinstance(value, Tensor):
                    value.copy_(torch.zeros_like(value) if known is None else known)
                elif type(value) is int:
                    state[name] = value - 1 if known is None else known
