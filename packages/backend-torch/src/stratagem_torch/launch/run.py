"""`stratagem run`: start every rank of a script at once, watch them, and end them together.

It does not import torch, so that all ranks can start importing it right away. Restarts are done by
torch.distributed.elastic.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from stratagem.cli import HelpFormatter, at_least
from stratagem.errors import StratagemError
from stratagem.launch import (
    LISTEN_FD_VARIABLE,
    STORE_VARIABLE,
    forget_foreign_variables,
    rank_environment,
    threads_per_rank,
)
from stratagem.system import ENDING
from stratagem_torch.launch import network
from stratagem_torch.launch.supervisor import Command, Output, RankProcesses

SUMMARY = "Run a script in several processes, one for each device."

_DESCRIPTION = f"""{SUMMARY}

The script trains with Trainer or Lite. Its ranks start at once and end together: when one fails,
the others are ended, and one error names it and shows its traceback.

Options may stand before and after SCRIPT. Unknown options are passed to the script, and so is
everything that follows `--`:

    stratagem run train.py --devices 2 --lr 0.1
    stratagem run train.py --devices 2 -- --devices "an option of the script"

A script that is written for Lightning runs unchanged with --as-lightning, which needs
`pip install stratagem-lightning`. Its imports of `lightning` and `pytorch_lightning` then mean
Stratagem. Without --devices it starts the ranks that its Trainer asks for:

    stratagem run --as-lightning train.py

A config file of Accelerate's gives the numbers of ranks and nodes, unless options do, and the
accelerator, precision and accumulate_grad_batches that the script's Lite leaves open. This needs
`pip install stratagem-extras`:

    stratagem run --accelerate-config default_config.yaml train.py

The exit code is that of the rank that failed first (128 and the number of the signal, if one ended
it), or 130 after Ctrl-C, 143 after SIGTERM. Two of Ctrl-C kill the ranks at once.

A script that calls torch.distributed by itself needs --main-port, or torchrun: without it, rank 0
is handed a port that is open already.
"""

_GRACE = 20.0
"""The time in seconds for ranks to end by themselves after a signal to this program. The 5 seconds
between SIGTERM and SIGKILL follow, within the 30 seconds of Kubernetes and SLURM."""

_SIGNALS = ENDING


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The options of a run; see the command-line options of the same names."""

    script: str
    script_arguments: tuple[str, ...]
    devices: int
    """The number of devices; with 0, the script starts its processes itself."""
    num_nodes: int
    node_rank: int
    main_address: str
    main_port: int | None
    """The port of rank 0; with None, any free port, on a single node only."""
    max_restarts: int
    log_dir: Path | None
    prefix: bool
    prefix_of_script: tuple[str, ...] = ()
    """Arguments of the interpreter before the script."""

    @property
    def program(self) -> list[str]:
        """The arguments of the interpreter."""
        return [*self.prefix_of_script, self.script, *self.script_arguments]

    @property
    def command(self) -> list[str]:
        """The command that each rank runs."""
        return [sys.executable, *self.program]

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.devices * self.num_nodes


def run(arguments: Sequence[str]) -> int:
    """Run a script as the arguments request; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2; no process was started), or ask for help.
    """
    launch = parse(arguments)
    # Remove the variables of an outer launch: the ranks would take them for their own.
    forget_foreign_variables(())
    if launch.log_dir is not None:
        try:
            launch.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"stratagem run: error: --log-dir: {error}", file=sys.stderr)
            return 2
    if not launch.devices:
        _become(launch.command, dict(os.environ))
    if launch.max_restarts:
        _become_torchrun(launch)
    return _start_and_watch(launch)


# -- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stratagem run",
        usage="stratagem run SCRIPT --devices N [options] [--] [arguments of the script]",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
        # The script's arguments must not depend on options with the same prefix.
        allow_abbrev=False,
        # Without argparse's own help, since its -h would also match a script's "-hidden".
        add_help=False,
    )
    add = parser.add_argument
    needed = "ranks on this node; needed but with --as-lightning or --accelerate-config"
    add("--devices", metavar="N", type=at_least(1), help=needed)
    lightning = "let `import lightning` mean Stratagem in SCRIPT (needs stratagem-lightning)"
    add("--as-lightning", action="store_true", help=lightning)
    config = "a config file of Accelerate's, YAML or JSON (needs stratagem-extras)"
    add("--accelerate-config", metavar="FILE", type=Path, help=config)
    add("--num-nodes", metavar="N", type=at_least(1), help="machines that take part")
    add("--node-rank", metavar="N", type=at_least(0), help="which of them this is, from 0")
    add("--main-address", metavar="HOST", help="the machine of node rank 0, for several nodes")
    add("--main-port", metavar="PORT", type=at_least(1), help="a port that is free there")
    restarts = "start all ranks again after a failure, so many times, by torch.distributed.elastic"
    add("--max-restarts", metavar="N", type=at_least(0), default=0, help=restarts)
    logs = "write each rank's output to a file there (rank0.log, ...), not to the terminal"
    add("--log-dir", metavar="DIR", type=Path, help=logs)
    add("--prefix", action="store_true", help="put [rank n] before each line of output")
    add("--help", action="help", help="show this and exit")
    return parser


def parse(arguments: Sequence[str]) -> Launch:
    """Parse the command line.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = _parser()
    ours, unread = list(arguments), []
    if "--" in ours:
        cut = ours.index("--")
        ours, unread = ours[:cut], ours[cut + 1 :]
    # Only options are declared, so the script and its arguments remain, in order.
    options, rest = parser.parse_known_args(ours)
    rest += unread

    if not rest:
        parser.error("expected a script to run: stratagem run train.py --devices 2")
    script = rest[0]
    if script.startswith("-"):
        from stratagem.discovery import nearest_of

        known = [option.removeprefix("--") for option in parser._option_string_actions]
        near = nearest_of(script.partition("=")[0].removeprefix("--"), known)
        parser.error(
            f"{script!r} is not an option of this command."
            + (f" Did you mean '--{near}'?" if near else "")
            + " Options of the script come after the script"
        )
    if not Path(script).is_file():
        parser.error(f"script={script!r}: there is no such file in {Path.cwd()}")
    fields = vars(options)
    if config := fields.pop("accelerate_config"):
        _take_config(config, fields)
    fields["num_nodes"] = fields["num_nodes"] or 1
    _check_devices(options, parser)
    _check_nodes(options, parser)
    before: Any = ()
    if fields.pop("as_lightning"):
        before = tuple(_provided("lightning_command", "--as-lightning"))
    for name, default in (("devices", 0), ("node_rank", 0), ("main_address", network.LOOPBACK)):
        fields[name] = fields[name] or default
    after = tuple(rest[1:])
    return Launch(script=script, script_arguments=after, prefix_of_script=before, **fields)


def _take_config(config: Path, fields: dict[str, Any]) -> None:
    """Fill options that were not given from a config, and set the variables of the ranks."""
    given, variables = _provided("accelerate_config", "--accelerate-config", config)
    fields.update({name: value for name, value in given.items() if fields[name] is None})
    os.environ.update(variables)


def _provided(name: str, option: str, *arguments: Any) -> Any:
    """Call a function of another distribution, which an option needs, and return its result.

    Raises:
        SystemExit: the function is missing or unusable (exit code 2). A line has the reason.
    """
    from stratagem.discovery import get_registry

    registry = get_registry()
    try:
        if registry.has("name", f"stratagem.cli.{name}"):
            return registry.find("name", f"stratagem.cli.{name}").spec.load()(*arguments)
        problem = " ".join(registry.possible_providers(name, "stratagem.cli"))
    except StratagemError as error:
        problem = str(error)
    print(f"stratagem run: error: {option} cannot be used. {problem}", file=sys.stderr)
    raise SystemExit(2)


def _check_devices(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.devices is not None:
        return
    if not options.as_lightning:
        parser.error("the following arguments are required: --devices")
    if options.num_nodes > 1 or options.max_restarts or options.log_dir or options.prefix:
        parser.error(
            "--as-lightning without --devices leaves the ranks to the script: give --devices as "
            "well for --num-nodes, --max-restarts, --log-dir and --prefix"
        )


def _check_nodes(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    num_nodes = options.num_nodes
    fields = vars(options).items()
    given = {f"--{name.replace('_', '-')}" for name, value in fields if value is not None}
    if num_nodes == 1:
        for option in ("--node-rank", "--main-address"):
            if option in given:
                parser.error(f"{option} is for several nodes: give --num-nodes as well")
        return
    # torch.distributed.elastic numbers the nodes in the order of arrival.
    needed = {"--main-address", "--main-port"}
    if not options.max_restarts:
        needed.add("--node-rank")
    if missing := " and ".join(sorted(needed - given)):
        parser.error(f"--num-nodes {num_nodes} needs {missing} as well, on each node")
    if options.node_rank is not None and options.node_rank >= num_nodes:
        parser.error(
            f"--node-rank {options.node_rank}: expected 0 to {num_nodes - 1}, since --num-nodes is "
            f"{num_nodes}"
        )


# -- without restarts


class _Signals:
    """Forwards signals that end this program to the ranks.

    Attributes:
        received: the first signal, or None.
        deadline: the end of the ranks' time, in seconds of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.deadline = float("inf")
        self._ranks: RankProcesses | None = None
        for number in _SIGNALS:
            # If the parent ignores a signal (nohup, background jobs of a shell), ignore it here.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def pass_on_to(self, ranks: RankProcesses) -> None:
        """Forward signals to these ranks, including a signal that was received before."""
        self._ranks = ranks
        if self.received is not None:
            ranks.forward_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        if not again:
            self.received = signal.Signals(number)
            self.deadline = time.monotonic() + _GRACE
        if self._ranks is None:
            return
        if again and number == signal.SIGINT:
            self._ranks.kill()
        else:
            self._ranks.forward_signal(signal.Signals(number))


def _start_and_watch(launch: Launch) -> int:
    # First of all, so that no signal can end this program and leave ranks running.
    signals = _Signals()
    listener, port, pass_fds = None, launch.main_port, {}
    if port is None and sys.platform == "win32":
        port = network.free_port()  # no child inherits a socket
    if port is None:
        # Listen on a free port here, and pass the socket to rank 0: so no other program can take
        # the port in between. Leaving the context closes this program's copy.
        listener = network.listen()
        port = listener.getsockname()[1]
    with listener or nullcontext():
        environments = _environments(launch, port)
        store = network.make_store_file() if launch.num_nodes == 1 else None
        if store is not None:
            for environment in environments.values():
                environment[STORE_VARIABLE] = store
        if listener is not None:
            pass_fds[0] = [listener.fileno()]
            environments[0][LISTEN_FD_VARIABLE] = str(listener.fileno())
        ranks = RankProcesses(
            # In separate sessions, only this program receives Ctrl-C, and forwards it once.
            Command(
                command=launch.command, pass_fds=pass_fds, new_sessions=True, die_with_this=True
            ),
            environments,
            # Print the error last, below the ranks' own output.
            on_failure=lambda failure: None,
            own_sessions=True,
            output=Output(launch.log_dir, launch.prefix),
        )
    try:
        with ranks:
            signals.pass_on_to(ranks)
            while not ranks.wait(0.5) and time.monotonic() < signals.deadline:
                pass
    finally:
        network.remove_store_file(store)
    if signals.received is not None:
        return 128 + signals.received
    if (failure := ranks.failure) is None:
        return 0
    print(failure.error(launch.world_size), file=sys.stderr)
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code


def _environments(launch: Launch, port: int) -> dict[int, dict[str, str]]:
    """Return the variables of each local rank, by global rank."""
    return {
        launch.node_rank * launch.devices + local_rank: rank_environment(
            local_rank=local_rank,
            local_world_size=launch.devices,
            node_rank=launch.node_rank,
            num_nodes=launch.num_nodes,
            main_address=launch.main_address,
            main_port=port,
        )
        for local_rank in range(launch.devices)
    }


# -- with restarts


def _become_torchrun(launch: Launch) -> NoReturn:
    """Replace this process by torch.distributed.elastic's launcher.

    Signals then reach the launcher, and its exit code is the command's.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={launch.devices}",
        f"--max-restarts={launch.max_restarts}",
    ]
    if launch.num_nodes == 1:
        # torchrun's store listens on every interface. On a single node use a file instead, which
        # torch creates for this user alone. Agents that start at the same time use separate files.
        command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
        command += [f"--rdzv-id={uuid.uuid4()}", f"--local-addr={network.LOOPBACK}"]
    else:
        command += [
            f"--nnodes={launch.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={launch.main_address}:{launch.main_port}",
        ]
    if launch.log_dir is not None:
        command += [f"--log-dir={launch.log_dir}", "--redirects=3"]
    command += launch.program
    environment = {
        **os.environ,
        # With the store of the rendezvous shared, the restart after a `kill -9` failed in 3 of 4
        # runs (torch 2.13.0, connectFullMesh refused); with a separate store, in 0 of 4.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": threads_per_rank(launch.devices),
    }
    _become(command, environment)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - no shell, as meant
