"""ScriptLauncher: this process becomes the first rank and runs its command again for the others."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from stratagem.errors import ConfigurationError
from stratagem.launch import (
    LAUNCH_VARIABLE,
    LISTEN_FD_VARIABLE,
    STARTED_IN,
    STORE_VARIABLE,
    Launcher,
    RunPlan,
    has_parent,
    own_variables,
    owns_variables,
    rank_environment,
    run_as_rank,
)
from stratagem_torch.launch import network
from stratagem_torch.launch.supervisor import Command
from stratagem_torch.launch.watch import Watch

Result = TypeVar("Result")


class ScriptLauncher(Launcher):
    """Runs the command line of this process again, once for each further rank of this node.

    The new processes run the script from its top and come to the same call, where they find that
    they are ranks already. All of them take part in whatever the script does afterwards.
    """

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Start the other ranks, unless an earlier call did, then run the function on this one.

        Raises:
            ConfigurationError: this process runs no script that could be started again, or is a
                further rank.
            RankFailedError: another rank failed.
        """
        if not has_parent() and not owns_variables():
            self._start_ranks(plan)
        return run_as_rank(function, *args, **kwargs)

    def _start_ranks(self, plan: RunPlan) -> None:
        if sys.argv[0] in ("", "-"):
            raise ConfigurationError(
                "the launcher 'script' runs the script again for each rank, but this program was "
                "read from standard input: save it in a file and run that"
            )
        environ = plan.request.environ
        if environ.get("LOCAL_RANK", "0") != "0":
            raise ConfigurationError(
                f"the launcher 'script' is to start ranks, and this process is one already, "
                f"LOCAL_RANK={environ['LOCAL_RANK']}: whoever has started it starts the others; "
                "let creates_processes_externally of the cluster environment be True, or unset "
                "LOCAL_RANK"
            )
        os.environ[LAUNCH_VARIABLE] = str(plan.request.ordinal)
        count = plan.processes_per_node
        node_rank = int(environ.get("NODE_RANK", "0"))
        address = environ.get("MASTER_ADDR", "127.0.0.1") if plan.num_nodes > 1 else "127.0.0.1"
        is_given = "MASTER_PORT" in environ and plan.num_nodes > 1
        listener = None if is_given else network.listen()
        main_port = listener.getsockname()[1] if listener else int(environ["MASTER_PORT"])

        environments = {
            node_rank * count + local_rank: rank_environment(
                local_rank=local_rank,
                local_world_size=count,
                node_rank=node_rank,
                num_nodes=plan.num_nodes,
                main_address=address,
                main_port=main_port,
            )
            for local_rank in range(count)
        }
        store = network.make_store_file() if plan.num_nodes == 1 else None
        if store is not None:
            # Registered before the watch, so called after it: then the other ranks have ended.
            atexit.register(network.remove_store_file, store)
            for environment in environments.values():
                environment[STORE_VARIABLE] = store
        own = environments.pop(node_rank * count)
        if environments:
            command = Command(command=[sys.executable, *sys.orig_argv[1:]], cwd=STARTED_IN)
            Watch.start(command, environments, plan.world_size)
        os.environ.update({k: v for k, v in own.items() if k != "OMP_NUM_THREADS"})
        own_variables()
        if listener is not None:
            # After the other ranks have started: they would inherit the number and not the socket.
            os.environ[LISTEN_FD_VARIABLE] = str(listener.detach())
