"""The pytest plugin of the conformance kits, which pytest finds by its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stratagem_testing.components.server import Server
    from stratagem_testing.strategies.session import Outcome, Reference

# Every run of pytest in the environment imports this module, so the kits, and torch, are imported
# by the fixtures.


@pytest.fixture(scope="session")
def stratagem_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the results of single_device, computed once for all strategies compared with it."""
    from stratagem_testing.strategies.session import Reference

    return Reference(tmp_path_factory.mktemp("stratagem_reference"))


@pytest.fixture(scope="session")
def stratagem_server() -> Iterator[Server]:
    """Return the process that runs the checks of components; it imports torch once for all."""
    from stratagem_testing.components.server import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="class")
def stratagem_outcomes(
    request: pytest.FixtureRequest,
    stratagem_reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outcome]:
    """Run the selected checks of a class, on ranks started once; return the outcome of each."""
    from stratagem_testing.strategies.session import run_checks

    kind = request.cls
    target = kind.target()
    names = [
        str(item.callspec.params["check"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.cls is kind and hasattr(item, "callspec")
    ]
    ran = run_checks(
        [(target, name) for name in names],
        tmp_path_factory.mktemp("conformance"),
        reference=stratagem_reference,
        deadline=kind.deadline,
    )
    return {name: outcome for (_, name), outcome in ran.items()}
