"""Finds the cluster environment of the processes that run already."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.discovery.registry import Candidate
from stratagem.discovery.specs import ClusterEnvironmentSpec
from stratagem.errors import ConfigurationError, UnknownNameError
from stratagem.plan.plan import NAMED, Cluster, Draft, Selection, given, selection_of

CLUSTER_VARIABLE = "STRATAGEM_CLUSTER"
"""Names the cluster environment; "none" switches detection off."""

PLAIN = "plain"

_STARTED = {
    "TorchElastic": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
    "LSF": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "SLURM": ("SLURM_STEP_ID", "SLURM_NTASKS"),
    "Kubeflow": ("KUBERNETES_PORT", "WORLD_SIZE"),
}
"""Environments of stratagem-backend-torch: a variable of each that its processes have, and the
variable with their number. Without that distribution each process would train alone."""


def find_cluster(draft: Draft) -> Cluster:
    """Return the requested cluster, or the detected cluster.

    Raises:
        ConfigurationError: the requested object is not a cluster environment.
    """
    environ = draft.request.environ
    asked = draft.asked("cluster_environment", None)
    if asked is not None and not isinstance(asked, str):
        selected = given(
            "cluster_environment",
            asked,
            method="creates_processes_externally",
            base="stratagem.environments.ClusterEnvironment",
        )
        external = bool(asked.creates_processes_externally)
        return Cluster(environment=selected, launched_this_process=external, environ=environ)
    if asked is not None:
        return _named(draft.find("cluster_environment", asked, NAMED), environ)
    switch = environ.get(CLUSTER_VARIABLE, "")
    if switch.casefold() == "none":
        why = f"detection is switched off by {CLUSTER_VARIABLE}=none"
        plain = draft.find("cluster_environment", PLAIN, why)
        return Cluster(environment=plain, launched_this_process=False, environ=environ)
    if switch:
        try:
            selected = draft.find("cluster_environment", switch, f"{CLUSTER_VARIABLE}={switch}")
        except UnknownNameError as error:
            raise UnknownNameError(f"{CLUSTER_VARIABLE}={switch}: {error}") from None
        return _named(selected, environ)
    return _detected(draft)


def _named(
    selected: Selection, environ: Mapping[str, str], rejected: tuple[Selection, ...] = ()
) -> Cluster:
    spec = selected.spec
    assert isinstance(spec, ClusterEnvironmentSpec)
    why_not = spec.why_not(environ)
    return Cluster(
        environment=selected,
        launched_this_process=not why_not and spec.local_rank_variable in environ,
        why_not_started=why_not,
        rejected=rejected,
        environ=environ,
    )


def _detected(draft: Draft) -> Cluster:
    """Return the detected cluster, with the reason why each of the others was passed over."""
    environ = draft.request.environ
    candidates: list[tuple[Candidate, ClusterEnvironmentSpec]] = [
        (candidate, candidate.spec)
        for candidate in draft.registry.candidates("cluster_environment")
        if isinstance(candidate.spec, ClusterEnvironmentSpec) and candidate.spec.variables
    ]
    candidates.sort(key=lambda each: each[1].priority, reverse=True)
    detected: Selection | None = None
    rejected = []
    for candidate, spec in candidates:
        why_not = spec.why_not(environ)
        if not why_not and detected is not None:
            why_not = f"{detected.name} goes before it"
        if why_not:
            rejected.append(selection_of(candidate, why_not))
        else:
            verb = "is" if len(spec.variables) == 1 else "are"
            detected = selection_of(candidate, f"{', '.join(spec.variables)} {verb} set")
    if detected is None:
        _check_alone(draft)
        detected = draft.find("cluster_environment", PLAIN, "no cluster was detected")
    return _named(detected, environ, tuple(rejected))


def _check_alone(draft: Draft) -> None:
    """Raise if a cluster whose environment is not installed has started several processes."""
    environ = draft.request.environ
    for name, (marker, number) in _STARTED.items():
        count = environ.get(number, "")
        if marker not in environ or not count.isdigit() or int(count) < 2:
            continue
        if not draft.registry.has("cluster_environment", name):
            hint = " ".join(draft.registry.possible_providers(name, "cluster_environment"))
            raise ConfigurationError(
                f"this process is one of {count} that {name} has started ({number}={count}), and "
                f"the cluster environment {name!r} is not there. {hint} To let each process train "
                f"alone, set {CLUSTER_VARIABLE}=none"
            )
