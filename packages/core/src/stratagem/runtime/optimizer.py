"""LiteOptimizer: an optimizer as the strategy steps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.strategy import Strategy

_SHADOWING = ("step", "zero_grad", "state_dict", "load_state_dict")
_NO_CONTEXT = nullcontext()


class LiteOptimizer:
    """The user's optimizer, whose step goes through the strategy.

    An instance is also an instance of the optimizer's class, and has its name and its repr, so that
    schedulers accept it. Copies and pickles contain only the user's optimizer, without the run.
    """

    optimizer: Optimizer
    prepared: PreparedModel
    strategy: Strategy
    _clear_gradients: Callable[[], None]
    is_held: bool = False
    """Whether `step` and `zero_grad` do nothing, because gradients still accumulate."""

    @property
    def state(self) -> Any:
        """The optimizer's state, looked up on each access, since loading replaces it."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        """The user's optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        """The user's optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Any = None, **arguments: Any) -> Any:
        """Step through the strategy.

        Args:
            closure: as torch's optimizers take it.
            **arguments: further ones that the optimizer's own `step` takes.

        Raises:
            ConfigurationError: an engine steps, which does not hand these arguments on.
        """
        if self.is_held:
            return None
        try:
            with _with_arguments(self, arguments) if arguments else _NO_CONTEXT:
                return self.strategy.optimizer_step(self.prepared, self.optimizer, closure)
        except RuntimeError as error:
            from stratagem.runtime.device_errors import raise_explained  # after failures only

            raise_explained(error, self.strategy, self.prepared)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if self.is_held:
            return
        # An engine has gradients of its own, and clears them in one way.
        if set_to_none or self.strategy.capabilities.engine_steps:
            self._clear_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.optimizer,)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names."""
        return self.strategy.optimizer_state(self.prepared, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state by parameter names."""
        self.strategy.load_optimizer_state(self.prepared, self.optimizer, state)


@contextmanager
def _with_arguments(wrapped: LiteOptimizer, arguments: dict[str, Any]) -> Iterator[None]:
    """Let the step of the user's optimizer, which a strategy calls, take further arguments."""
    if wrapped.strategy.capabilities.engine_steps:
        raise ConfigurationError(
            f"{type(wrapped).__name__}.step() received {', '.join(arguments)}, but the engine of "
            f"{type(wrapped.strategy).__name__} takes this step and passes no arguments on: call "
            "step() without them, or choose another strategy"
        )
    own: dict[str, Any] = vars(wrapped.optimizer)
    before = own.get("step")
    own["step"] = partial(wrapped.optimizer.step, **arguments)
    try:
        yield
    finally:
        del own["step"]
        if before is not None:
            own["step"] = before


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer


def wrap_optimizer(optimizer: Optimizer, prepared: PreparedModel, strategy: Strategy) -> Any:
    """Return a `LiteOptimizer` that stands for the user's optimizer, under its class's name."""
    own = type(optimizer)
    if issubclass(own, LiteOptimizer):
        raise ConfigurationError(
            "setup() received an optimizer that was set up before: pass the optimizer itself"
        )
    # The qualified name hides the class: command lines look for classes by name.
    place = f"wrap_optimizer.<locals>.{own.__qualname__}"
    names = {"__module__": __name__, "__qualname__": place, "__doc__": own.__doc__}
    kind = type(own.__name__, (LiteOptimizer, own), names)
    wrapped: Any = object.__new__(kind)
    # A scheduler made earlier has put a counting `step` on the instance: ours comes first, and
    # calls it.
    wrapped.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name not in _SHADOWING}
    )
    wrapped.optimizer, wrapped.prepared, wrapped.strategy = optimizer, prepared, strategy
    wrapped._clear_gradients = prepared.gradient_clearer(optimizer)
    return wrapped
