"""The pytest plugin of the conformance kits, which pytest finds by its entry point."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem_testing.components.server import Server
from stratagem_testing.strategies.session import Outcome, Reference, run_checks


@pytest.fixture(scope="session")
def stratagem_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return what single_device comes to: once for all strategies that are compared with it."""
    return Reference(tmp_path_factory.mktemp("stratagem_reference"))


@pytest.fixture(scope="session")
def stratagem_server() -> Iterator[Server]:
    """Return what runs the checks of components: one process has imported torch for all."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="class")
def stratagem_outcomes(
    request: pytest.FixtureRequest,
    stratagem_reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outcome]:
    """Run the checks of a class that are selected, on ranks started once; what came of each."""
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
