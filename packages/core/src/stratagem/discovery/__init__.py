"""Discovery, the light zone: what plugin authors import; neither torch nor an SDK is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.discovery.capabilities import (
        OWN_BACKWARD as OWN_BACKWARD,
        OWN_CLIPPING as OWN_CLIPPING,
        OWN_FOLLOWING as OWN_FOLLOWING,
        OWN_STEP as OWN_STEP,
        START_METHODS as START_METHODS,
        Capabilities as Capabilities,
        contradictions as contradictions,
        difference as difference,
        one_process_of as one_process_of,
    )
    from stratagem.discovery.entry_points import (
        CORE as CORE,
        DISABLE_VARIABLE as DISABLE_VARIABLE,
        FIRST as FIRST,
        GROUP as GROUP,
        PluginEntry as PluginEntry,
        core_range as core_range,
        fits as fits,
        installed_entries as installed_entries,
        misplaced_entries as misplaced_entries,
        normalise as normalise,
        read_text as read_text,
        why_not_lasting as why_not_lasting,
    )
    from stratagem.discovery.former import (
        FORMER as FORMER,
        Change as Change,
        changes_of as changes_of,
        what_became as what_became,
        with_former_names as with_former_names,
    )
    from stratagem.discovery.hints import (
        distribution_of as distribution_of,
        gpus as gpus,
        installation_hint as installation_hint,
        names_by_distribution as names_by_distribution,
    )
    from stratagem.discovery.hookspecs import (
        Check as Check,
        Command as Command,
        hookimpl as hookimpl,
    )
    from stratagem.discovery.installed import (
        TorchBuild as TorchBuild,
        find_module as find_module,
        require_package as require_package,
        torch_build as torch_build,
        version_of as version_of,
        why_missing as why_missing,
    )
    from stratagem.discovery.registry import (
        RUN_TIME as RUN_TIME,
        Candidate as Candidate,
        PluginReport as PluginReport,
        Registry as Registry,
        get_registry as get_registry,
        nearest_of as nearest_of,
        says_its_preset as says_its_preset,
    )
    from stratagem.discovery.specs import (
        PLUGIN_API_VERSION as PLUGIN_API_VERSION,
        AcceleratorSpec as AcceleratorSpec,
        Availability as Availability,
        CallbackSpec as CallbackSpec,
        CheckpointIOSpec as CheckpointIOSpec,
        ClusterEnvironmentSpec as ClusterEnvironmentSpec,
        ComponentSpec as ComponentSpec,
        LauncherSpec as LauncherSpec,
        LoggerSpec as LoggerSpec,
        NameSpec as NameSpec,
        Objection as Objection,
        PrecisionSpec as PrecisionSpec,
        ProfilerSpec as ProfilerSpec,
        StrategySpec as StrategySpec,
        Target as Target,
        load_target as load_target,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
