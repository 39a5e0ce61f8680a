"""The pages for authors, from the empty folder on: each file is written, each command run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.guide, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
PORT = "8099"
TIMEOUT = 2400
"""Seconds for all of it; torch is installed once, and the kit is run twice."""

UNTIL_IT_LISTENS = """\
until python -c 'import socket; socket.create_connection(("127.0.0.1", PORT), 1)' 2>/dev/null
do kill -0 $! && sleep 0.2; done
"""
LEAVE = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"


def script(page: str, port: int) -> str:
    """A page as a program for bash: files where they belong, then the commands, in its order."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```(sh|python)\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = ["set -eux -o pipefail\n", LEAVE]
    for language, text in blocks:
        if language == "python":
            first, _, rest = text.partition("\n")
            lines.append(f"printf %s {shlex.quote(rest)} > {first.removeprefix('# ')}\n")
            continue
        for line in text.splitlines():
            lines.append(f"{line}\n")
            if line.endswith(" &"):
                lines.append(UNTIL_IT_LISTENS)
    return "".join(lines).replace("PORT", PORT).replace(PORT, str(port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_page(page: str, build_wheel: Callable[[Path, Path], Path], tmp_path: Path) -> str:
    """Run a page in an empty folder; return what it printed."""
    wheels = tmp_path / "wheels"
    for package in ("core", "testing"):
        build_wheel(ROOT / "packages" / package, wheels)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("STRATAGEM_", "PYTHON"))},
        # Our packages are on no index yet; and torch is the one that the other tests run with.
        "PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}".strip(),
        "PIP_CONSTRAINT": str(constraints),
        "OMP_NUM_THREADS": "1",
        # numpy is optional to torch, which says so by a warning when it is missing.
        "PYTHONWARNINGS": "ignore",
    }
    with subprocess.Popen(
        ["bash", "-c", script(page, free_port())],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            said, _ = running.communicate()
            pytest.fail(f"it takes more than {TIMEOUT} s:\n{said}")
    assert running.returncode == 0, said
    return said


def test_the_page_leads_to_a_wheel_that_works(
    build_wheel: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    said = run_page("extend/write-a-strategy.md", build_wheel, tmp_path)
    trained = re.findall(r"^tensor\(\[\[(.+?)\]\]", said, re.MULTILINE)
    assert len(trained) == 2  # from the source tree, and from the index
    for weights in trained:
        assert [float(each) for each in weights.split(",")] == pytest.approx([1.0] * 3, abs=0.05)
    assert said.count("No problem found.") == 3
    assert said.count(" passed in ") == 2
    assert "Successfully installed stratagem-backend-sign-vote-0.1.0" in said


def test_the_page_of_other_components_leads_to_a_wheel(
    build_wheel: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    said = run_page("extend/write-a-component.md", build_wheel, tmp_path)
    assert said.count("No problem found.") == 1
    assert said.count(" passed in ") == 1
    assert "stratagem_backend_tape-0.1.0-py3-none-any.whl" in said
