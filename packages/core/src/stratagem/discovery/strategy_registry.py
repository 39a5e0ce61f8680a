"""StrategyRegistry: strategies by name, for code that registers them at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.registry import get_registry
from stratagem.discovery.specs import PLUGIN_API_VERSION, StrategySpec
from stratagem.errors import ConfigurationError


class _StrategyRegistry:
    """Strategies by name, for code that registers them at run time.

    Example:
        >>> from stratagem import StrategyRegistry
        >>> from stratagem.strategies import DDPStrategy
        >>> StrategyRegistry.register("ddp_static", DDPStrategy, description="DDP, static graph",
        ...                           static_graph=True)
        >>> "ddp_static" in StrategyRegistry.available_strategies()
        True
        >>> StrategyRegistry.remove("ddp_static")
    """

    def register(
        self,
        name: str,
        strategy: type[Any],
        *,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> None:
        """Make `Trainer(strategy=name)` mean `strategy(**init_params)`, in this process.

        Args:
            name: the name to select it by.
            strategy: a Strategy class.
            description: one line for listings.
            override: replace a strategy that has this name.
            **init_params: keyword arguments of the class.

        Raises:
            ConfigurationError: the name is taken and `override` is False; or `strategy` is not a
                Strategy class.
        """
        capabilities = getattr(strategy, "capabilities", None)
        if not isinstance(strategy, type) or not isinstance(capabilities, Capabilities):
            raise ConfigurationError(
                f"StrategyRegistry.register({name!r}, ...) expected a subclass of "
                f"stratagem.strategies.Strategy, received {strategy!r}"
            )
        get_registry().add(
            StrategySpec(
                name=name,
                target=strategy,
                api_version=PLUGIN_API_VERSION,
                summary=description or (strategy.__doc__ or "").strip().partition("\n")[0],
                init_args=init_params,
                capabilities=capabilities,
            ),
            override=override,
        )

    def get(self, name: str) -> Any:
        """Return a new instance of a strategy, with its preset arguments.

        Raises:
            UnknownNameError: no strategy has that name.
        """
        return get_registry().find("strategy", name).spec.build()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return what is registered: "strategy", its class, with "init_params" and "description".

        Raises:
            UnknownNameError: no strategy has that name.
        """
        spec = get_registry().find("strategy", name).spec
        return {
            "strategy": spec.load(),
            "strategy_name": spec.name,
            "description": spec.summary,
            "init_params": dict(spec.init_args),
        }

    def remove(self, name: str) -> None:
        """Take back a registration made in this process; what it had replaced is found again."""
        get_registry().remove("strategy", name)

    def available_strategies(self) -> list[str]:
        """Return the names of all strategies, discovered and registered, sorted."""
        return get_registry().names("strategy")

    def __contains__(self, name: object) -> bool:
        return name in self.available_strategies()

    def __iter__(self) -> Iterator[str]:
        return iter(self.available_strategies())


StrategyRegistry = _StrategyRegistry()
"""Strategies by name; see `register`, `get`, `remove` and `available_strategies`;
`StrategyRegistry["ddp"]` is what is registered."""
