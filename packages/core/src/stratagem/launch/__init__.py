"""The parts of a launcher: send a function to every rank, and return results and failures.

A launcher of your own starts processes, and lets each process run the function::

    from stratagem.launch import Launcher, free_port, pack, rank_environment, run_packed
    from stratagem.launch import rank_failure

    class MyLauncher(Launcher):
        new_processes = True      # the process that calls `launch` is no rank

        def launch(self, plan, function, *args, **kwargs):
            call, port = pack(plan, function, args, kwargs), free_port()
            count = plan.processes_per_node
            jobs = [
                my_cluster.submit(
                    run_packed,     # in a process of its own: returns what the function returns
                    call,
                    rank_environment(local_rank=rank, local_world_size=count, main_port=port),
                )
                for rank in range(count)
            ]
            # The first to fail is the cause: the others lose their connection to it.
            if error := my_cluster.first_error(jobs):
                my_cluster.cancel(jobs)
                raise rank_failure(error.rank, plan.world_size, report=error.traceback)
            return jobs[0].result()

If other processes than your own could change the returned bytes, let the rank return
`pack_result(run_packed(...))`, and read it with `unpack_result`, which executes nothing. A launcher
that restarts ranks names a cluster environment of its own (`Launcher.cluster_environment`). The
cluster environment tells the ranks that they were restarted: `fit` then resumes from the last
checkpoint.

A launcher works with every strategy whose `Capabilities.launchers` is None (ddp, fsdp and their
families), in the Trainer and Lite: `Trainer(strategy="ddp", devices=2, plugins=MyLauncher())`. It
can also be selected by the name of a `LauncherSpec` that a plugin declares. `free_port`, `pack`,
`rank_failure`, `run_packed` and `Restarts` come with stratagem-backend-torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_exports

if TYPE_CHECKING:
    from stratagem.interfaces.launcher import Launcher as Launcher
    from stratagem.launch.environment import (
        LOOPBACK_INTERFACE as LOOPBACK_INTERFACE,
        STARTED_IN as STARTED_IN,
        rank_environment as rank_environment,
    )
    from stratagem.launch.process import (
        available_cores as available_cores,
        host_memory as host_memory,
        open_standard_streams as open_standard_streams,
        print_hint as print_hint,
        printable as printable,
        threads_per_rank as threads_per_rank,
    )
    from stratagem.launch.rank import (
        ERROR_FILE_VARIABLE as ERROR_FILE_VARIABLE,
        LAUNCH_VARIABLE as LAUNCH_VARIABLE,
        LISTEN_FD_VARIABLE as LISTEN_FD_VARIABLE,
        OWNER_VARIABLE as OWNER_VARIABLE,
        PARENT_VARIABLE as PARENT_VARIABLE,
        STORE_VARIABLE as STORE_VARIABLE,
        at_end_of_rank as at_end_of_rank,
        crash_file as crash_file,
        die_with_parent as die_with_parent,
        end_rank as end_rank,
        exit_with_error as exit_with_error,
        explained as explained,
        forget_foreign_variables as forget_foreign_variables,
        forget_parent as forget_parent,
        has_parent as has_parent,
        own_variables as own_variables,
        owns_variables as owns_variables,
        record_failure as record_failure,
        run_as_rank as run_as_rank,
        this_rank as this_rank,
    )
    from stratagem.launch.rank_zero import (
        rank_zero_debug as rank_zero_debug,
        rank_zero_info as rank_zero_info,
        rank_zero_only as rank_zero_only,
        rank_zero_warn as rank_zero_warn,
    )
    from stratagem.launch.stack import (
        IN_CALLS as IN_CALLS,
        line_in_traceback as line_in_traceback,
        operation as operation,
        users_line as users_line,
    )
    from stratagem.plan.plan import (
        RunPlan as RunPlan,
        RunRequest as RunRequest,
        Selection as Selection,
    )
    from stratagem.state.safe_data import pack_result as pack_result, unpack_result as unpack_result
    from stratagem_torch.launch.network import free_port as free_port
    from stratagem_torch.launch.packed import (
        pack as pack,
        rank_failure as rank_failure,
        run_packed as run_packed,
    )
    from stratagem_torch.launch.restarts import Restarts as Restarts
else:
    __getattr__, __dir__ = lazy_exports(__name__)
