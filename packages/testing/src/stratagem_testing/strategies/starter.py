"""Starter: a process that has imported torch, and forks one for each session's script.

An import of torch takes longer than most checks. A fork runs the script as `python script` would:
with its arguments, its folder and variables, and its end.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stratagem_testing.processes import clean_environment


class Starter:
    """Starts one script after another; ends with the program."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that no answer waits in a buffer that select cannot see
        )
        atexit.register(self._close)

    def start(self, script: Path, argument: str, environ: Mapping[str, str]) -> int:
        """Run a script in its folder and in a session of its own; return its process.

        What it prints goes to the files `stdout` and `stderr` beside it.
        """
        assert self._process.stdin is not None
        asked = json.dumps([str(script), argument, dict(environ)])
        self._process.stdin.write(asked.encode() + b"\n")
        return self._answer()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of the last process.

        None: it has not ended by then.
        """
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], seconds)[0]
        return self._answer() if ready else None

    def _answer(self) -> int:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            starter.cache_clear()
            raise RuntimeError("the process that starts the ranks of the checks has ended")
        return int(answer)

    def _close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


@functools.cache
def starter() -> Starter:
    """Return this program's starter."""
    return Starter()


def main() -> None:
    """Serve: a line of JSON for each script, and its process and its exit code as the answers."""
    answers = os.fdopen(os.dup(1), "w")
    # A fork copies no threads: waiting for a thread of torch would never end.
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as the first optimizer does, in seconds
    requests = os.fdopen(os.dup(0))
    while line := requests.readline():
        script, argument, environ = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            answers.close()
            _become(Path(script), argument, environ)
            return  # the program ends as any other one
        print(pid, file=answers, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(script: Path, argument: str, environ: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(script.parent)
    for number, name in enumerate((os.devnull, "stdout", "stderr")):
        flags = os.O_RDWR if name == os.devnull else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    searched = [str(script.parent), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, searched), *(p for p in sys.path[1:] if p not in searched)]
    # The launcher "script" runs these again.
    sys.argv = [str(script), argument]
    sys.orig_argv = [sys.executable, *sys.argv]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
