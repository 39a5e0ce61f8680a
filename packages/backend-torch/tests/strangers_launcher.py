"""A launcher as a stranger would write it: by the public names of `stratagem.launch` only."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.environments import ClusterEnvironment
from stratagem.errors import CommunicationError
from stratagem.launch import (
    Launcher,
    RunPlan,
    free_port,
    pack,
    pack_result,
    rank_environment,
    rank_failure,
    run_packed,
    unpack_result,
)


class SubprocessLauncher(Launcher):
    """Starts `python strangers_launcher.py FOLDER RANK` for each rank, on "nodes" of this host."""

    interactive = True
    new_processes = True
    spans_nodes = True

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "call").write_bytes(pack(plan, function, args, kwargs))
            return self._run(plan, folder)

    def _run(self, plan: RunPlan, folder: Path) -> Any:
        port, local = free_port(), plan.processes_per_node
        processes = []
        for rank in range(plan.world_size):
            environment = rank_environment(
                local_rank=rank % local,
                local_world_size=local,
                node_rank=rank // local,
                num_nodes=plan.num_nodes,
                main_port=port,
                cluster_environment=self.cluster_environment,
            )
            (folder / f"{rank}.environment").write_bytes(pickle.dumps(environment))
            processes.append(subprocess.Popen([sys.executable, __file__, folder, str(rank)]))
        while any(process.poll() is None for process in processes):
            time.sleep(0.02)
            if failed := [rank for rank, p in enumerate(processes) if p.poll() not in (None, 0)]:
                time.sleep(0.5)  # the cause may come second
                for process in processes:
                    process.terminate()
                raise self._failure(plan, folder, processes, failed)
        if failed := [rank for rank, process in enumerate(processes) if process.poll()]:
            raise self._failure(plan, folder, processes, failed)
        return unpack_result((folder / "0.result").read_bytes())

    def _failure(
        self, plan: RunPlan, folder: Path, processes: list[Any], failed: list[int]
    ) -> Exception:
        reports = {}
        for rank in range(plan.world_size):
            file = folder / f"{rank}.report"
            if file.exists():
                reports[rank] = file.read_text()
        causes = [r for r, text in reports.items() if CommunicationError.__name__ not in text]
        rank = (causes or failed)[0]
        exit_code = processes[rank].wait()
        return rank_failure(
            rank, plan.world_size, report=reports.get(rank, ""), exit_code=exit_code or 1
        )


class RestartingLauncher(SubprocessLauncher):
    """Tells its ranks, by an environment of its own, that they are started for the second time."""

    cluster_environment = "second_start"


class SecondStart(ClusterEnvironment):
    """What the ranks of a RestartingLauncher read."""

    def run_id(self) -> str:
        return "of a stranger"

    def restart_count(self) -> int:
        return 1


def main(folder: Path, rank: str) -> None:
    environment = pickle.loads((folder / f"{rank}.environment").read_bytes())
    try:
        result = pack_result(run_packed((folder / "call").read_bytes(), environment))
    except Exception:
        temporary = folder / f"{rank}.writing"
        temporary.write_text(traceback.format_exc())
        temporary.replace(folder / f"{rank}.report")
        os._exit(1)
    (folder / f"{rank}.result").write_bytes(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
