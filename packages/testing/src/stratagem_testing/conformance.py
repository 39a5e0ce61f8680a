"""Conformance: what the classes of all kits have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from stratagem_testing.components.component import Component
    from stratagem_testing.strategies.target import Target


class Conformance:
    """Tests of one component: one for each check of its kit.

    Attributes:
        deadline: seconds that a check may take.
    """

    deadline: ClassVar[float] = 60.0

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
