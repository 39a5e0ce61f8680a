"""What the tests over Ray share: a cluster on loopback, and programs that train on it."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_programs import RAY, TRAIN, Program, Told, clean_environment

from stratagem.launch import free_port


@pytest.fixture(scope="session")
def for_rays_own() -> Iterator[dict[str, str]]:
    """Variables of all Ray's processes: a token of these tests, and a folder that goes with them.

    Not pytest's own folder: the path of a socket in it may have 107 bytes only.
    """
    with tempfile.TemporaryDirectory(prefix="sgray-") as folder:
        token = secrets.token_hex(32)
        yield {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": folder}


@pytest.fixture(scope="session")
def cluster(
    for_rays_own: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A cluster on loopback; returns the variables by which programs find it."""
    port = free_port()
    program = Program(
        [
            *(RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
            *("--num-cpus=8", "--num-gpus=2", "--include-dashboard=false"),
        ],
        tmp_path_factory.mktemp("cluster") / "cluster.txt",
        clean_environment(**for_rays_own, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0"),
    )
    try:
        program.wait_for("Ray runtime started.")
        yield {**for_rays_own, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        program.kill()


@pytest.fixture
def start(tmp_path: Path, cluster: dict[str, str]) -> Iterator[Callable[..., Program]]:
    """Start train.py on the cluster, with two ranks; ended after the test."""
    started: list[Program] = []

    def begin(out: Path, *options: str, **environment: str) -> Program:
        command = [sys.executable, str(TRAIN), str(out), "--devices=2", *options]
        place = tmp_path / f"program{len(started)}.txt"
        program = Program(command, place, clean_environment(**cluster, **environment))
        started.append(program)
        return program

    yield begin
    for program in started:
        program.kill()


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """What the ranks tell that write to this test's folder."""
    return Told(tmp_path / "run")
