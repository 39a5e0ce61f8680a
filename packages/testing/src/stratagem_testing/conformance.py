"""Conformance: what the classes of all kits have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from stratagem.discovery import FORMER, nearest_of, what_became
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem_testing.components.component import Component
    from stratagem_testing.strategies.target import Target


class Conformance:
    """Tests of one component: one for each check of its kit.

    Attributes:
        deadline: seconds that a check may take.
    """

    deadline: ClassVar[float] = 60.0

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise if an attribute that the kit does not read has a former or a similar name.

        Raises:
            ConfigurationError: the message names the attribute, and the attribute that the kit
                reads.
        """
        super().__init_subclass__(**options)
        if not cls.__module__.startswith("stratagem_testing."):
            _check_attributes(cls)

    @classmethod
    def checks(cls) -> Sequence[str]:
        """Return the names of the checks that are to pass, in the order in which they run."""
        raise NotImplementedError("each kit names its checks")

    @classmethod
    def target(cls) -> Target | Component:
        """Return the component to test, given by the attributes of this class."""
        raise NotImplementedError("each kit makes what it tests")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each check; called by pytest."""
        if "check" in metafunc.fixturenames:
            metafunc.parametrize("check", self.checks())

    @staticmethod
    def judge(judge: Callable[[], Any]) -> None:
        """Let a failed check fail the test, without the traceback, which is the kit's."""
        try:
            judge()
        except AssertionError as error:
            said = str(error)
        else:
            return
        # Outside of `except`: pytest would print the caught error as well.
        pytest.fail(said, pytrace=False)


def _check_attributes(kind: type[Conformance]) -> None:
    kits = [base for base in kind.__mro__ if base.__module__.startswith("stratagem_testing.")]
    known = sorted({name for kit in kits for name in dir(kit) if not name.startswith("_")})
    known += [name for kit in kits for name in vars(kit).get("__annotations__", {})]
    changes = {name: each for kit in kits for name, each in FORMER.get(kit.__name__, {}).items()}
    for name, value in vars(kind).items():
        if name in changes:
            raise ConfigurationError(what_became(f"{kind.__name__}.{name}", changes[name]))
        is_setting = not name.startswith("_") and name not in known and not callable(value)
        near = nearest_of(name, known, cutoff=0.8) if is_setting else ""
        if near:
            raise ConfigurationError(
                f"{kind.__name__}.{name} is no attribute of the kit: did you mean {near}?"
            )
