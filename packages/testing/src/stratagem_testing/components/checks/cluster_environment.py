"""Cluster environments: ranks that agree, a place to meet, and nothing that stays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from stratagem.discovery import ClusterEnvironmentSpec, get_registry
from stratagem.environments import ClusterEnvironment
from stratagem.errors import ConfigurationError
from stratagem.launch import LISTEN_FD_VARIABLE, RunRequest
from stratagem.plan import resolve
from stratagem_testing.child import Child, Report, StuckError
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.every import pickled
from stratagem_testing.surroundings import Surroundings

KIND = "cluster_environment"
_NOT_THE_AUTHORS = {"stratagem", "stratagem_torch", "builtins", "abc"}
_PATIENCE = 40.0
_FIRST_PORT = 1024
"""Of those that a program may listen on without rights of its own."""
_NAMES = 200
"""Names of jobs that are tried: of ports that are drawn from 0 to 20000, one is below 1024."""


def _ranks(bench: Bench) -> list[dict[str, str]]:
    ranks: list[dict[str, str]] = bench.option("ranks")
    assert len(ranks) > 1, f"`ranks` has the variables of {len(ranks)} rank(s); expected 2 or more"
    return ranks


def _numbers(environment: ClusterEnvironment) -> dict[str, int]:
    """Return what a rank learns about its place."""
    return {
        "world_size": environment.world_size(),
        "local_world_size": environment.local_world_size(),
        "global_rank": environment.global_rank(),
        "local_rank": environment.local_rank(),
        "node_rank": environment.node_rank(),
    }


def _at_home(environment: ClusterEnvironment) -> ClusterEnvironment:
    """Give this fork what an interpreter of its own has, and return the environment.

    Random numbers, hashes of text, and the time of the start differ between ranks.
    """
    number = environment.global_rank() + 1
    random.seed(number)
    now = time.time
    time.time = lambda: now() + 3600.0 * number
    for base in type(environment).__mro__:
        if base.__module__.partition(".")[0] not in _NOT_THE_AUTHORS:
            vars(sys.modules[base.__module__])["hash"] = lambda value: hash(value) ^ number
    return environment


@check(KIND, "ranks/consistent")
def _consistent(bench: Bench) -> None:
    """Every rank has its own number. All ranks agree on the numbers of ranks and nodes."""
    ranks = _ranks(bench)
    found = []
    for variables in ranks:
        with bench.environ(variables):
            environment = bench.make()
            assert isinstance(environment, ClusterEnvironment), (
                f"{bench.component.name} made {environment!r}: subclass "
                "stratagem.environments.ClusterEnvironment"
            )
            found.append(_numbers(environment))
            environment.teardown()
    for number, told in enumerate(found):
        for name, value in told.items():
            assert type(value) is int, f"{name}() returned {value!r} of rank {number}; expected int"
        assert told["world_size"] == len(ranks), (
            f"world_size() is {told['world_size']} of {len(ranks)} ranks, with the variables of "
            f"`ranks`[{number}]"
        )
        assert 0 <= told["local_rank"] < told["local_world_size"], (
            f"local_rank() is {told['local_rank']}, and local_world_size() "
            f"{told['local_world_size']}: a device would be chosen that is not there"
        )
        place = told["node_rank"] * told["local_world_size"] + told["local_rank"]
        assert told["global_rank"] == place, (
            f"global_rank() is {told['global_rank']}, and node_rank() * local_world_size() + "
            f"local_rank() is {place}: {told}"
        )
    numbers = sorted(told["global_rank"] for told in found)
    assert numbers == list(range(len(ranks))), f"global_rank() is {numbers} of the ranks"
    nodes = len({told["node_rank"] for told in found})
    assert nodes == bench.option("nodes"), (
        f"node_rank() has {nodes} different value(s), and the job has {bench.option('nodes')} "
        "node(s)"
    )


@check(KIND, "ranks/read when asked")
def _read_when_asked(bench: Bench) -> None:
    """A copy that was made before the launch returns the rank of the process that asks.

    Users make the object in the launching program, and the ranks get copies.
    """
    try:
        made = bench.make()
    except ConfigurationError:
        return  # it cannot be made but by a rank
    except Exception as error:
        raise AssertionError(
            f"making it where no rank's variables are set ended in {brief(error)}: read variables "
            "when a method is called, and not in __init__; raise ConfigurationError if only a rank "
            "can make it"
        ) from None
    # A front end reads some attributes there, before a launcher copies the object.
    bench.error(lambda: made.creates_processes_externally)
    for _, ask in _reads(made):
        bench.error(ask)
    for number, variables in enumerate(_ranks(bench)):
        with bench.environ(variables):
            expected, found = ({**_numbers(it), **_more(it)} for it in (bench.make(), made))
        assert found == expected, (
            f"one that was made before the variables of `ranks`[{number}] were set has {found}, "
            f"and one that is made with them {expected}: read variables whenever a method is "
            "called, and not in __init__, and keep nothing"
        )

    ranks = _ranks(bench)[0]
    for name, value in ranks.items():
        made = bench.make()
        for _, ask in _reads(made):
            bench.error(ask)
        with bench.environ({**ranks, name: f"{value}1"}):
            for (what, ask), (_, ask_new) in zip(_reads(made), _reads(bench.make()), strict=True):
                if bench.error(ask_new) is None:
                    stale = bench.error(ask) or ask()
                    assert stale == ask_new(), (
                        f"{what}() of one that was made and asked before {name}={value}1 was set "
                        f"is {stale!r}, and of a new one {ask_new()!r}: read variables whenever a "
                        "method is called, and keep nothing"
                    )


@check(KIND, "ranks/started by the cluster")
def _external(bench: Bench) -> None:
    """creates_processes_externally is True in a rank that the cluster has started."""
    for number, variables in enumerate(_ranks(bench)):
        with bench.environ(variables):
            environment = bench.make()
            external = environment.creates_processes_externally
            environment.teardown()
        assert external is True, (
            f"creates_processes_externally is {external!r} with the variables of "
            f"`ranks`[{number}]: each rank would start further ones"
        )


def _reads(environment: ClusterEnvironment) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what can be asked without waiting for other ranks, by its name."""
    yield "_numbers", lambda: _numbers(environment)
    for name in ("run_id", "restart_count", "agent_id"):
        yield name, getattr(environment, name)


def _more(environment: ClusterEnvironment) -> dict[str, Any]:
    """Return what a front end asks on each rank besides."""
    return {
        "creates_processes_externally": environment.creates_processes_externally,
        **{name: getattr(environment, name)() for name in ("run_id", "restart_count", "agent_id")},
    }


@check(KIND, "ranks/not a number")
def _not_a_number(bench: Bench) -> None:
    """If an environment variable is not a number, an error names the variable.

    If one is missing, there is a default, or a ConfigurationError.
    """
    ranks = _ranks(bench)[1]
    for variable, value in ranks.items():
        for text in ("two", "", None) if value.isdigit() else ("", None):
            changed = {k: v for k, v in ranks.items() if k != variable}
            if text is not None:
                changed[variable] = text
            with bench.environ(changed):
                for name, ask in _reads(bench.make()):
                    error = bench.error(ask)
                    assert error is None or isinstance(error, ConfigurationError), (
                        f"{name}() with {variable}={text!r} ended in {brief(error)}; expected a "
                        "ConfigurationError that says which variable is wrong, and what it has"
                    )
                    assert error is None or text != "two" or variable in str(error), (
                        f"the error of {name}() does not name {variable}: {error}"
                    )
    spec = bench.component.spec
    if not isinstance(spec, ClusterEnvironmentSpec):
        return  # only the spec names the variables
    reads: dict[str, Callable[[ClusterEnvironment], int]] = {
        spec.world_size_variable: lambda environment: environment.world_size(),
        spec.rank_variable: lambda environment: environment.global_rank(),
    }
    for variable, read in reads.items():
        if variable not in _ranks(bench)[1]:
            continue
        with bench.environ({**_ranks(bench)[1], variable: "two"}):
            error = bench.error(lambda read=read: read(bench.make()))  # type: ignore[misc]
        assert isinstance(error, ConfigurationError), (
            f"{variable}='two' ended in {brief(error)}; expected a ConfigurationError"
        )
        assert variable in str(error), f"the error does not name {variable}: {error}"


@check(KIND, "detection/by its variables")
def _detected(bench: Bench) -> None:
    """The spec detects the cluster if the variables of a rank are set, and only then."""
    spec = bench.component.spec
    if not isinstance(spec, ClusterEnvironmentSpec) or not spec.variables:
        return  # chosen by name
    for number, variables in enumerate(_ranks(bench)):
        why_not = spec.why_not(variables)
        assert not why_not, f"it is not detected with the variables of `ranks`[{number}]: {why_not}"
    assert spec.why_not({}), "it is detected where none of its variables is set"
    if len(spec.variables) > 1:
        said = spec.why_not({spec.variables[0]: "1"})
        assert spec.variables[1] in said, (
            f"where only {spec.variables[0]} is set, why_not() says {said!r}, and not what is "
            "missing"
        )


@check(KIND, "detection/chosen")
def _chosen(bench: Bench) -> None:
    """A front end in a rank chooses the environment, and finds all ranks."""
    spec = bench.component.spec
    ranks, nodes = _ranks(bench), bench.option("nodes")
    named = spec is None or not getattr(spec, "variables", ())
    for number, variables in enumerate(ranks):
        with bench.environ(variables):
            request = RunRequest(
                accelerator="cpu",
                strategy="ddp",
                devices=len(ranks) // nodes,
                num_nodes=nodes,
                cluster_environment=bench.component.given if named else None,
                environ=dict(os.environ),
                interactive=False,
            )
            plan = resolve(request, get_registry())
        if spec is not None:
            assert plan.cluster_environment.name == spec.name, (
                f"with the variables of `ranks`[{number}] a front end takes the cluster "
                f"environment {plan.cluster_environment.name!r} ({plan.cluster_environment.why}): "
                "say other variables, or a higher priority"
            )
        assert plan.world_size == len(ranks), (
            f"the plan has {plan.world_size} of {len(ranks)} ranks"
        )
        assert plan.launcher.name == "external", (
            f"with the variables of `ranks`[{number}] the launcher is {plan.launcher.name!r}: a "
            "rank that is there already would start others"
        )


@check(KIND, "meeting/main address and port", slow=True)
def _meeting(bench: Bench) -> None:
    """All ranks have the same address and port. Rank 0 can listen there, and others connect.

    main_address follows the variables that have it. A port that follows from the job, such as from
    its name, is one from 1024 to 65535 in all jobs.
    """

    def meet(report: Report, variables: Mapping[str, str]) -> None:
        # Users make the object in the launching program, and the ranks get copies.
        try:
            made = bench.make()
            os.environ.update(variables)
        except ConfigurationError:
            os.environ.update(variables)
            made = bench.make()
        environment = _at_home(made)
        address, port = environment.main_address, environment.main_port
        report(address=address, port=port)
        if environment.global_rank() == 0 and not environment.holds_store:
            descriptor = environment.take_listener()
            listener = (
                socket.create_server((address, port))
                if descriptor is None
                else socket.socket(fileno=descriptor)
            )
            report(listens=listener.getsockname()[1])
            again = environment.take_listener()
            report(again=again is None)
            signal.pause()  # the other ranks may query this rank's place

    children = [bench.in_child(partial(meet, variables=each)) for each in _ranks(bench)]
    try:
        found = [_told(child, number) for number, child in enumerate(children)]
        _judge_other_places(_of_other_jobs(bench))
        address, port = found[0]
        assert isinstance(address, str) and address, f"main_address is {address!r}"  # noqa: PT018
        assert isinstance(port, int) and 0 < port < 1 << 16, f"main_port is {port!r}"  # noqa: PT018
        for number, other in enumerate(found):
            assert other == (address, port), (
                f"rank 0 says that ranks meet at {address}:{port}, and rank {number} at "
                f"{other[0]}:{other[1]}: neither may depend on the process, as hash() does"
            )
        if (listens := children[0].next_report(5.0)) is None:
            return  # the program that started the ranks holds the store
        assert listens == {"listens": port}, (
            f"take_listener() returned a socket on port {listens}, and main_port is {port}"
        )
        assert children[0].next_report(5.0) == {"again": True}, (
            "take_listener() returned a socket twice: it is handed over once"
        )
        error = bench.error(lambda: socket.create_connection((address, port), 5).close())
        assert error is None, f"another rank cannot connect to {address}:{port}: {brief(error)}"
    finally:
        for child in children:
            child.end()


def _judge_other_places(told: list[dict[str, Any]]) -> None:
    for early, expected in [each["early"] for each in told if "early" in each]:
        assert early == expected, (
            "one that was made before the variables of `ranks`[0] were set has the main address or "
            f"port {early!r}, and one that is made with them {expected!r}: read variables in "
            "main_address and main_port, and not in __init__"
        )
    follows = [each["follows"] for each in told if "follows" in each]
    assert not follows or any(followed for _, followed in follows), (
        f"main_address is the same if another host is in {', '.join(name for name, _ in follows)}: "
        "ranks on other nodes would look for rank 0 on their own. Read it from what the cluster "
        "sets"
    )
    for job, port in [each["port"] for each in told if "port" in each]:
        assert _FIRST_PORT <= port < 1 << 16, (
            f"main_port is {port} in a job with {job}; expected {_FIRST_PORT} to 65535, for the "
            "numbers and names of all jobs"
        )


def _of_other_jobs(bench: Bench) -> list[dict[str, Any]]:
    """Return main_address and main_port where variables of the job have other values.

    "early": what one says that was made without the variables, and one with them; "follows":
    whether main_address is another one if a variable that has it is changed; "port": main_port of
    another job.
    """
    ranks, numbers = _ranks(bench), ("8", "65540", "4294967299")
    alike = [k for k, v in ranks[0].items() if all(r.get(k) == v for r in ranks)]
    # A port that a variable has is the user's.
    asked = [
        (name, text)
        for name in alike
        if "PORT" not in name.upper()
        for text in (
            numbers if ranks[0][name].isdigit() else [f"{ranks[0][name]}{n}" for n in range(_NAMES)]
        )
    ]

    def read(report: Report) -> None:
        for key in ranks[0]:
            del os.environ[key]
        try:
            early = bench.make()
        except ConfigurationError:
            early = None  # it cannot be made but by a rank
        os.environ.update(ranks[0])
        address = bench.make().main_address
        if early is not None:
            report(early=[early.main_address, address])
        ports = {bench.make().main_port for _ in range(2)}
        if early is not None and len(ports) == 1:  # a shared port, and not any free port
            report(early=[early.main_port, ports.pop()])
        holding = [name for name in alike if address in ranks[0][name]]
        for name in holding:
            os.environ[name] = ranks[0][name].replace(address, "elsewhere")
            with contextlib.suppress(ConfigurationError):
                report(follows=[name, bench.make().main_address != address])
            os.environ[name] = ranks[0][name]
        for variable, text in asked:
            os.environ[variable] = text
            environment = bench.make()
            with contextlib.suppress(ConfigurationError):
                if environment.world_size() == len(ranks):
                    report(port=[f"{variable}={text}", environment.main_port])
            environment.teardown()
            os.environ[variable] = ranks[0][variable]

    child = bench.in_child(read, ranks[0])
    with contextlib.suppress(StuckError):
        child.wait_for("nothing", 5.0)  # of one that waits for other ranks nothing is judged
    return child.end()


def _told(child: Child, number: int) -> tuple[Any, Any]:
    try:
        told = child.next_report(_PATIENCE)
    except StuckError:
        told = None
    assert told is not None, (
        f"rank {number} did not learn main_address and main_port in {_PATIENCE:.0f} s, while the "
        "other ranks were there, or raised an error"
    )
    return told["address"], told["port"]


@check(KIND, "meeting/sum over ranks", slow=True)
def _sum(bench: Bench) -> None:
    """Ranks that share only the variables of the cluster train together."""
    ranks, nodes = _ranks(bench), bench.option("nodes")

    def add(report: Report) -> None:
        import torch

        lite = bench.lite(
            strategy="ddp",
            devices=len(ranks) // nodes,
            num_nodes=nodes,
            plugins=[bench.component.given],
        )
        lite.launch()
        total = lite.all_reduce(torch.tensor(float(lite.global_rank + 1)), "sum")
        lite.barrier()
        report(rank=lite.global_rank, total=float(total))

    children = [bench.in_child(add, variables) for variables in ranks]
    until = time.monotonic() + _PATIENCE  # of all together, less than a check may take
    try:
        told = [_next(child, until - time.monotonic()) for child in children]
    finally:
        for child in children:
            child.end()
    log = bench.folder.parent / "children.log"
    expected = [
        {"rank": rank, "total": sum(range(1, len(ranks) + 1))} for rank in range(len(ranks))
    ]
    found = sorted(filter(None, told), key=lambda one: int(one["rank"]))
    assert found == expected, (
        f"the ranks came to {told}, expected {expected}\n{log.read_text(errors='replace')[-3000:]}"
    )


def _next(child: Child, patience: float) -> dict[str, Any] | None:
    try:
        return child.next_report(patience)
    except StuckError:
        return None


@check(KIND, "life/nothing changed")
def _nothing_changed(bench: Bench) -> None:
    """It changes no environment variable, and its teardown leaves no thread, file or socket."""
    with bench.environ(_ranks(bench)[0]):
        before, variables = Surroundings.now(), dict(os.environ)
        environment = bench.make()
        _numbers(environment)
        _read_more(environment)
        if not environment.holds_store:
            descriptor = environment.take_listener()
            if descriptor is not None:
                os.close(descriptor)
        environment.teardown()
        environment.teardown()
        now = dict(os.environ)
        changed = before.changes()
    _judge_variables(variables, now)
    assert not changed, f"after teardown() there is {'; '.join(changed)}"
    assert not bench.files(), f"it has left {', '.join(bench.files())} in the current folder"


def _read_more(environment: ClusterEnvironment) -> None:
    """Read where ranks meet, and what the cluster does at the end."""
    assert environment.main_address
    assert environment.main_port
    run_id, agent = environment.run_id(), environment.agent_id()
    count = environment.restart_count()
    for name, value in (("run_id", run_id), ("agent_id", agent)):
        assert value is None or isinstance(value, str), (
            f"{name}() returned {value!r}; expected a text, or None"
        )
    assert isinstance(count, int) and count >= 0, (  # noqa: PT018
        f"restart_count() returned {count!r}; expected how often the run was started again, from 0"
    )
    signals = environment.preemption_signals
    assert isinstance(signals, tuple) and all(isinstance(s, signal.Signals) for s in signals), (  # noqa: PT018
        f"preemption_signals is {signals!r}; expected a tuple of signal.Signals"
    )
    for number in signals:
        answer = environment.requeues_upon(number)
        assert isinstance(answer, bool), f"requeues_upon({number!r}) returned {answer!r}"


def _judge_variables(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = sorted(
        name
        for name in before.keys() | now.keys()
        if before.get(name) != now.get(name) and name != LISTEN_FD_VARIABLE
    )
    assert not changed, (
        f"reading the environment changed the variable(s) {', '.join(changed)}: a process that is "
        "started from this one would take itself for something else"
    )


@check(KIND, "life/same for all")
def _alike(bench: Bench) -> None:
    """run_id and restart_count are the same on every rank, and do not change.

    Each rank is a process of its own. agent_id is the same on the ranks of a node. Another job has
    another run_id, and a restart of the same job has not, nor another agent_id.
    """

    def read(report: Report) -> None:
        environment = _at_home(bench.make())
        for _ in range(2):
            report(told=[environment.run_id(), environment.restart_count()])
        report(agent=[environment.node_rank(), environment.agent_id()])
        environment.teardown()

    children = [bench.in_child(read, variables) for variables in _ranks(bench)]
    try:
        told = [[_next(child, _PATIENCE) for _ in range(2)] for child in children]
        agents = [(_next(child, _PATIENCE) or {}).get("agent") for child in children]
    finally:
        for child in children:
            child.end()
    log = bench.folder.parent / "children.log"
    assert all(each[1] for each in told), (
        f"a rank did not tell run_id and restart_count\n{log.read_text(errors='replace')[-3000:]}"
    )
    for first, again in told:
        assert again == first, f"run_id and restart_count are {first}, and then {again}"
    found = [first["told"] for first, _ in told if first]
    assert all(each == found[0] for each in found), (
        f"run_id and restart_count differ by rank: {found}. Take them from what the cluster gives "
        "to every rank of a job, and to its next start; not from the process"
    )
    for node, agent in filter(None, agents):
        others = {other for number, other in filter(None, agents) if number == node}
        assert others == {agent}, (
            f"agent_id differs by rank of node {node}: {others}. It is that of the program that "
            "restarts the node's ranks, and outlives them"
        )
    if found and found[0][0] is not None:
        _judge_other_jobs(bench, found[0])


def _judge_other_jobs(bench: Bench, own: list[Any]) -> None:
    """Fail if no other variables make another run, or if those of a restart do."""
    variables = _ranks(bench)[0]
    changes = False
    with bench.environ(variables):
        agent = bench.make().agent_id()
    for name, value in variables.items():
        with bench.environ({**variables, name: f"{value}1"}):
            environment = bench.make()
            told: list[Any] = []
            error = bench.error(
                lambda told=told, it=environment: told.extend(  # type: ignore[misc]
                    [it.run_id(), it.restart_count(), it.agent_id()]
                )
            )
        if error is not None:
            continue
        changes = changes or told[0] != own[0]
        assert told[1] == own[1] or told[0] == own[0], (
            f"with {name}={value}1 restart_count() is {told[1]}, and run_id() {told[0]!r}, before "
            f"{own[0]!r}: a run keeps its id when it is restarted, or it would begin anew"
        )
        assert told[1] == own[1] or told[2] == agent, (
            f"with {name}={value}1 restart_count() is {told[1]}, and agent_id() {told[2]!r}, "
            f"before {agent!r}: the agent outlives the ranks that it restarts"
        )
    assert changes, (
        f"run_id() is {own[0]!r} whatever the variables of the cluster are: another job in the "
        "same folder would continue from this one's checkpoint. Take what identifies the job"
    )


check(KIND, "life/pickled")(pickled)
