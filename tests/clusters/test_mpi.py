"""Real mpirun, on one host and over two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

Train = Callable[..., list[str]]
Results = Callable[..., list[dict[str, Any]]]


def test_processes_of_one_node_find_one_another(
    mpirun: tuple[str, ...],
    start: Callable[..., Any],
    train: Train,
    results: Results,
    reference: Any,
) -> None:
    text = start(*mpirun, "-np", "2", *train()).wait()
    ranks = results()
    assert [each["ranks"] for each in ranks] == [[0, 0, 0], [1, 1, 0]], text
    assert {each["environment"] for each in ranks} == {"MPI"}
    assert ranks[0]["weights"] == pytest.approx(reference(2), abs=1e-6)


def test_processes_of_two_nodes_meet_by_mpi4py(
    mpirun: tuple[str, ...],
    hosts: Any,
    start: Callable[..., Any],
    train: Train,
    results: Results,
    tmp_path: Path,
) -> None:
    pytest.importorskip("mpi4py")
    agent = tmp_path / "agent.sh"
    on_host = " ".join(f"'{part}'" for part in hosts.command(2, "bash", "-c"))
    # mpirun calls it as it would call ssh: with the host's name and a command line.
    agent.write_text(f'#!/bin/bash\nshift\nexec {on_host} "$*"\n')
    agent.chmod(0o755)
    over = ["--host", "node1,node2", "--mca", "plm_rsh_agent", str(agent), "-np", "2"]
    text = start(*hosts.command(1, *mpirun, *over, *train())).wait()
    ranks = results()
    assert [each["host"] for each in ranks] == ["node1", "node2"], text
    assert {each["main"][0] for each in ranks} == {"10.78.0.1"}
    assert ranks[0]["weights"] == ranks[1]["weights"]
