"""Discovery: metadata, specs, names, hints, and strategies that code registers at run time."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import stratagem.discovery.registry as registries
import stratagem.one_device.plugin
import stratagem_torch.plugin
from stratagem import StrategyRegistry, __version__
from stratagem.cli.doctor import misplaced_checks, problems_of
from stratagem.discovery import (
    AcceleratorSpec,
    Capabilities,
    CheckpointIOSpec,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)
from stratagem.discovery.entry_points import (
    PluginEntry,
    installed_entries,
    normalise,
    why_disabled,
    why_incompatible,
)
from stratagem.discovery.installed import find_module, version_of
from stratagem.discovery.registry import PluginReport, Registry, get_registry
from stratagem.errors import AmbiguousNameError, ConfigurationError, PluginError, UnknownNameError
from stratagem.strategies import DDPStrategy, SingleDeviceStrategy


def strategy(name: str, **options: Any) -> StrategySpec:
    return StrategySpec(name=name, **{"target": "nowhere:Nothing", "api_version": 1, **options})


def plugin_of(*specs: ComponentSpec, **hooks: Callable[..., Any]) -> object:
    """A plugin module with these components and hooks."""
    module = types.ModuleType("plugin")

    def stratagem_components() -> Iterable[ComponentSpec]:
        return specs

    for name, hook in {"stratagem_components": stratagem_components, **hooks}.items():
        setattr(module, name, hookimpl(hook))
    return module


def entry_of(
    plugin: object = None,
    distribution: str = "stranger",
    *,
    name: str = "entry",
    requires_core: str = "",
) -> PluginEntry:
    return PluginEntry(name, "nowhere", distribution, "1.0", requires_core, lambda: plugin)


CORE = entry_of(stratagem.one_device.plugin, "stratagem-core")
TORCH = entry_of(stratagem_torch.plugin, "stratagem-backend-torch")


def discover(*entries: PluginEntry, **environ: str) -> Registry:
    return Registry.discover(entries, environ)


def report_of(*entries: PluginEntry, **environ: str) -> PluginReport:
    """The report on the last of these."""
    return discover(*entries, **environ).reports[-1]


# -- entry points and metadata


class Site:
    """A folder with distributions as pip leaves them behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def install(
        self,
        name: str,
        *requirements: str,
        version: str = "1.0",
        entries: str = "[stratagem.backends]\nentry = plugin_module",
        info: str = "dist-info",
    ) -> None:
        folder = self.folder / f"{name.replace('-', '_')}-{version}.{info}"
        folder.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        text = "\n".join([*lines, "", "Requires-Dist: stratagem-core>=9", "(an example)"])
        (folder / ("METADATA" if info == "dist-info" else "PKG-INFO")).write_text(text)
        if entries:
            (folder / "entry_points.txt").write_text(entries)

    def entries(self) -> list[PluginEntry]:
        return installed_entries([str(self.folder)])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def test_core_and_the_backends_of_this_environment_are_found() -> None:
    entries = {(entry.distribution, entry.name): entry for entry in installed_entries()}
    core = entries["stratagem-core", "one_device"]
    assert (core.value, core.version) == ("stratagem.one_device.plugin", __version__)
    assert core.requires_core == ""
    assert core.load() is stratagem.one_device.plugin
    assert list(entries) == sorted(entries)
    for (distribution, _), entry in entries.items():
        if distribution.startswith("stratagem-backend-"):
            assert why_incompatible(entry, __version__) is None
            assert why_incompatible(entry, "99.0") is not None


@pytest.mark.parametrize(
    ("group", "entry", "refused"),
    [
        ("stratagem.backends", "native = evil.plugin", True),
        ("stratagem.backends", "one_device = stratagem.one_device.plugin:evil", True),
        ("stratagem.backends", "other = stratagem.one_device.plugin", True),
        ("stratagem.backends", "one_device = stratagem.one_device.plugin", False),
        ("console_scripts", "stratagem = evil:main", False),
    ],
)
def test_distribution_on_the_path_cannot_replace_core(
    group: str, entry: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Site(tmp_path / "first")
    place.install(
        "Stratagem.Core", "stratagem-core>=9", version="9.9", entries=f"[{group}]\n{entry}"
    )
    monkeypatch.syspath_prepend(str(place.folder))
    registry = Registry.discover(environ={})
    found = registry.find("strategy", "single_device")
    assert (found.distribution, found.version) == ("stratagem-core", __version__)
    assert found.spec == discover(CORE).find("strategy", "single_device").spec
    reports = [report for report in registry.reports if report.distribution == "stratagem-core"]
    assert {(r.entry_point, r.status, r.reason) for r in reports} == {
        ("one_device", "loaded", ""),
        *(
            (
                entry.partition(" ")[0],
                "incompatible",
                f"a distribution in {str(place.folder)!r} calls itself stratagem-core too; core's "
                "own plugin is 'stratagem.one_device.plugin' of the package that runs: remove that "
                "distribution",
            )
            for _ in range(refused)
        ),
    }
    told = (
        f"stratagem: entry points: stratagem-core 9.9 lies in {str(place.folder)!r}, but "
        f"{__version__} runs: remove it there, or reinstall stratagem-core."
    )
    assert told in problems_of(registry.reports, {}, misplaced_checks(registry))


def test_a_version_is_read_from_metadata_of_each_form(tmp_path: Path) -> None:
    wheel, egg, old, zipped = (tmp_path / name for name in ("wheel", "egg", "old", "zip.zip"))
    for info, text in {
        wheel / "Some_Thing-1.5.dist-info" / "METADATA": "Name: Some.Thing\nVersion: 1.5+cpu\n",
        egg / "some_thing-1.4.egg-info" / "PKG-INFO": "Version: 1.4\n\nVersion: 9\n",
        old / "some_thing-1.3.egg-info": "Name: some-thing\nVersion: 1.3\n",
    }.items():
        info.parent.mkdir(parents=True)
        info.write_text(text)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("some_thing-1.2.dist-info/METADATA", "Name: some-thing\nVersion: 1.2\n")
    places = [str(place) for place in (tmp_path / "nothing", wheel, egg, old, zipped)]
    assert [version_of("some-thing", [place]) for place in places] == [
        *(None, "1.5+cpu", "1.4", "1.3", "1.2")
    ]
    assert version_of("Some.Thing", places) == "1.5+cpu"  # the first, as an import would take
    assert version_of("some", places) is None


def test_version_of_agrees_with_importlib_metadata() -> None:
    for name in ("torch", "pluggy", "stratagem-core", "Typing_Extensions"):
        assert version_of(name) == metadata.version(name)


def test_entry_has_the_fields_of_its_metadata(site: Site) -> None:
    site.install("Strange.Name", "torch>=2.9", "stratagem-core<0.2,>=0.1", version="2.5")
    (entry,) = site.entries()
    assert (entry.distribution, entry.version) == ("strange-name", "2.5")
    assert (entry.name, entry.value) == ("entry", "plugin_module")
    assert entry.requires_core == "<0.2,>=0.1"


def test_only_entries_of_the_group_count(site: Site) -> None:
    declared = (
        "[console_scripts]\nprogram = other:main\n\n"
        "[ stratagem.backends ]\n# a comment\none = a.b\n\ntwo = a.b : thing.part [extra]\n"
        "[stratagem.backends.other]\nthree = c\n"
    )
    site.install("several", entries=declared)
    site.install("none-of-ours", entries="[console_scripts]\nprogram = other:main")
    site.install("none-at-all", entries="")
    assert [(e.name, e.value) for e in site.entries()] == [
        ("one", "a.b"),
        ("two", "a.b : thing.part [extra]"),
    ]


def test_an_entry_may_name_an_object(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("plugin_module")
    module.thing = types.SimpleNamespace(part="found")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugin_module", module)
    declared = "[stratagem.backends]\na = plugin_module\nb = plugin_module : thing.part [extra]"
    site.install("objects", entries=declared)
    assert [entry.load() for entry in site.entries()] == [module, "found"]


def test_the_first_of_two_distributions_of_one_name_counts(tmp_path: Path) -> None:
    first, second = Site(tmp_path / "first"), Site(tmp_path / "second")
    first.install("twice", version="1.0", entries="[stratagem.backends]\na = x")
    second.install("Twice", version="2.0", entries="[stratagem.backends]\na = y\nb = y")
    first.install("shadows", entries="")
    second.install("shadows")
    entries = installed_entries([str(first.folder), str(second.folder), str(first.folder)])
    assert [(e.distribution, e.name, e.version) for e in entries] == [("twice", "a", "1.0")]


def test_leftovers_of_an_interrupted_pip_are_ignored(site: Site) -> None:
    site.install("~tratagem-core")
    assert site.entries() == []


def test_places_without_distributions_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "no_archive.zip"
    file.write_text("not a zip file")
    assert installed_entries([str(tmp_path / "nowhere"), str(file), str(tmp_path)]) == []


def test_a_zip_file_on_the_path_is_read(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        info = "zipped-1.5.dist-info"
        metadata = "Name: Zipped\nVersion: 1.5\nRequires-Dist: stratagem-core<9\n"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/entry_points.txt", "[stratagem.backends]\nentry = zipped")
    (entry,) = installed_entries([str(archive)])
    assert (entry.distribution, entry.version, entry.requires_core) == ("zipped", "1.5", "<9")


def test_metadata_of_the_older_form_are_read(site: Site) -> None:
    site.install("newer")
    site.install("older", info="egg-info")
    requires = site.folder / "older-1.0.egg-info" / "requires.txt"
    requires.write_text("torch\nstratagem-core<0.2\n\n[testing]\nstratagem-core>=9\n")
    assert [(e.distribution, e.requires_core) for e in site.entries()] == [
        ("newer", ""),
        ("older", "<0.2"),
    ]


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        ([], ""),
        (["torch"], ""),
        (["stratagem-core"], ""),
        (["Stratagem_Core (>=0.1)"], ">=0.1"),
        (["stratagem-core >=0.1 , <0.2"], ">=0.1 , <0.2"),
        (["stratagem-core[testing]~=0.1"], "~=0.1"),
        (["stratagem-core==0.1.*"], "==0.1.*"),
        (["stratagem-core >=banana"], ">=banana"),  # refused where it is compared
        (["stratagem-core-extras>=7"], ""),
        (["stratagem-core>=7; extra == 'testing'"], ""),
        (["stratagem-core>=7; python_version < '3'"], ""),
        (["stratagem-core<9; python_version > '3'", "stratagem-core>=0.1"], "<9,>=0.1"),
    ],
)
def test_requires_core_evaluates_environment_markers(
    site: Site, requirements: list[str], expected: str
) -> None:
    site.install("plugin", *requirements)
    assert site.entries()[0].requires_core == expected


@pytest.mark.parametrize(
    ("clauses", "version", "fits"),
    [
        ("", "0.1.0", True),
        (">=0.1,<0.2", "0.1.0", True),
        (">=0.1,<0.2", "0.1.9", True),
        (">=0.1,<0.2", "0.2", False),
        (">=0.1,<0.2", "0.2.0", False),
        (">=0.1.1", "0.1.0", False),
        (">=0.1.0", "0.1", True),
        (">=0.9", "0.10.0", True),
        ("~=0.1", "0.9", True),
        ("==0.1.*", "0.1.7", True),
        ("!=0.1.7,>=0", "0.1.7", False),
        (">0.1", "0.1.0", False),
        ("<=0.1", "0.1.0", True),
        # A version of core that is being developed.
        (">=0.1,<0.2", "0.1.1.dev3", True),
        (">=0.1,<0.2", "0.2.0.dev3", False),
        (">=0.1,<0.2", "0.2.1.dev3", False),
    ],
)
def test_versions_are_compared_as_pip_does(clauses: str, version: str, fits: bool) -> None:
    assert (why_incompatible(entry_of(requires_core=clauses), version) is None) == fits


def test_incompatible_requirement_names_the_pip_command() -> None:
    text = why_incompatible(entry_of(requires_core="<0.1"), "0.1.0")
    assert text == (
        "requires stratagem-core<0.1, but stratagem-core 0.1.0 is installed: "
        "pip install --upgrade stranger stratagem-core"
    )
    text = why_incompatible(entry_of(requires_core=">=x"), "0.1.0")
    assert text is not None
    assert "its requirement stratagem-core>=x cannot be read" in text


@pytest.mark.parametrize("name", ["My_Dist.Name", "my--dist-.name", " MY-DIST-NAME "])
def test_names_of_distributions_are_normalised(name: str) -> None:
    assert normalise(name) == "my-dist-name"


@pytest.mark.parametrize(
    ("variables", "disabled"),
    [
        ({}, None),
        ({"STRATAGEM_DISABLE_PLUGINS": ""}, None),
        ({"STRATAGEM_DISABLE_PLUGINS": "other"}, None),
        ({"STRATAGEM_DISABLE_PLUGINS": "other, My_Dist"}, "disabled by STRATAGEM_DISABLE_PLUGINS"),
        ({"STRATAGEM_DISABLE_PLUGINS": "MY-ENTRY,"}, "disabled by STRATAGEM_DISABLE_PLUGINS"),
        ({"STRATAGEM_ONLY_PLUGINS": "other"}, "left out of STRATAGEM_ONLY_PLUGINS"),
        ({"STRATAGEM_ONLY_PLUGINS": "other,my-dist"}, None),
        ({"STRATAGEM_ONLY_PLUGINS": "my_entry"}, None),
        (
            {"STRATAGEM_ONLY_PLUGINS": "my-dist", "STRATAGEM_DISABLE_PLUGINS": "my-dist"},
            "disabled by STRATAGEM_DISABLE_PLUGINS",
        ),
    ],
)
def test_variables_switch_plugins_off(variables: dict[str, str], disabled: str | None) -> None:
    assert why_disabled(entry_of(distribution="my-dist", name="my_entry"), variables) == disabled


def test_core_is_switched_off_only_by_name() -> None:
    assert why_disabled(CORE, {"STRATAGEM_ONLY_PLUGINS": "other"}) is None
    assert why_disabled(CORE, {"STRATAGEM_DISABLE_PLUGINS": "stratagem-core"}) is not None


# -- specs


@pytest.mark.parametrize("name", ["", "my strategy", "-x", "a:b", "ä", 3])
def test_spec_name_with_bad_characters_is_refused(name: Any) -> None:
    expected = "expected (letters, digits, '_', '-' and|a string)"
    with pytest.raises(PluginError, match=expected) as caught:
        strategy(name)
    assert repr(name) in str(caught.value)
    with pytest.raises(PluginError):
        strategy("fine", aliases=(name,))


@pytest.mark.parametrize("target", ["", "package.module", ":Class", "module:", "a b:C", 3, None])
def test_a_target_that_names_nothing_is_refused(target: Any) -> None:
    with pytest.raises(PluginError, match=r"expected 'package\.module:Class'") as caught:
        strategy("mine", target=target)
    assert f"'mine' has target={target!r}" in str(caught.value)


def test_aliases_are_a_tuple() -> None:
    with pytest.raises(PluginError, match="has aliases='abc'; expected a tuple of names"):
        strategy("mine", aliases="abc")


def test_capabilities_refuse_values_of_other_types() -> None:
    with pytest.raises(PluginError) as caught:
        Capabilities(launchers="spawn")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Capabilities has launchers='spawn'; expected a tuple of names or None; of one it is "
        "('name',)"
    )
    with pytest.raises(PluginError, match="Capabilities has multi_node=1; expected True or False"):
        Capabilities(multi_node=1)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="'mine' has api_version='1'; expected a number"):
        strategy("mine", api_version="1")
    with pytest.raises(PluginError, match=r"'mine' has summary=None; expected a string"):
        strategy("mine", summary=None)


def test_capabilities_are_of_their_class() -> None:
    with pytest.raises(PluginError, match=r"expected stratagem\.discovery\.Capabilities"):
        strategy("mine", capabilities={"multi_node": True})


def test_a_spec_cannot_be_changed_and_needs_its_fields() -> None:
    spec = CheckpointIOSpec(name="mine", target="a:B", api_version=1)
    assert spec.kind == "checkpoint_io"
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError, match="api_version"):
        CheckpointIOSpec(name="mine", target="a:B")  # type: ignore[call-arg]


def test_a_spec_builds_its_target_with_preset_arguments() -> None:
    spec = strategy("counter", target="collections:Counter", init_args={"a": 1, "b": 2})
    assert (spec.class_name, spec.load().__name__) == ("Counter", "Counter")
    assert spec.build(b=5) == {"a": 1, "b": 5}
    assert strategy("nested", target="json:JSONDecoder.decode").load() is not None
    of_class = strategy("of_class", target=DDPStrategy)
    assert (of_class.class_name, of_class.load()) == ("DDPStrategy", DDPStrategy)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no_such_module:Class", "ModuleNotFoundError"),
        ("collections:NoSuchClass", "AttributeError"),
        ("exits_at_import:Class", "SystemExit: the SDK gave up"),
        ("stops_at_import:Class", "GeneratorExit: the SDK stopped"),
    ],
)
def test_a_target_that_cannot_be_imported_names_the_component(
    target: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit('the SDK gave up')")
    (tmp_path / "stops_at_import.py").write_text("raise GeneratorExit('the SDK stopped')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as caught:
        strategy("mine", target=target).load()
    text = str(caught.value)
    assert f"cannot import strategy 'mine': target={target!r} failed with {cause}" in text
    assert "`stratagem doctor` says more" in text
    assert caught.value.__cause__ is not None


def test_ctrl_c_within_the_import_of_a_plugin_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted").mkdir()
    (tmp_path / "interrupted" / "__init__.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        strategy("mine", target="interrupted:Class").load()
    with pytest.raises(KeyboardInterrupt):
        find_module("interrupted.inner")
    entry = PluginEntry(
        "e", "nowhere", "x", "1", "", lambda: importlib.import_module("interrupted")
    )
    with pytest.raises(KeyboardInterrupt):
        report_of(CORE, entry)


# -- what becomes of a plugin; `tests/test_broken_plugins.py` has real distributions


def test_a_plugin_is_loaded_and_counted() -> None:
    report = report_of(CORE, entry_of(plugin_of(strategy("mine"), strategy("other"))))
    assert (report.status, report.components, report.notes) == ("loaded", 2, ())
    assert (report.distribution, report.version) == ("stranger", "1.0")
    assert report.seconds >= 0


def test_a_plugin_may_be_an_object() -> None:
    class Plugin:
        @hookimpl
        def stratagem_components(self) -> list[ComponentSpec]:
            return [strategy("mine")]

    assert discover(entry_of(Plugin())).names("strategy") == ["mine"]


def test_one_module_cannot_be_two_plugins() -> None:
    plugin = plugin_of(strategy("mine"))
    registry = discover(entry_of(plugin, name="a"), entry_of(plugin, name="b"))
    assert [report.status for report in registry.reports] == ["loaded", "broken"]
    assert registry.names("strategy") == ["mine"]


def test_hooks_of_a_plugin_that_failed_are_not_called() -> None:
    def components() -> Any:
        raise ValueError("no")

    def refuse(plan: object) -> None:
        raise AssertionError("it was called")

    broken = plugin_of(stratagem_components=components, stratagem_run_planned=refuse)
    other_api = plugin_of(strategy("mine", api_version=3), stratagem_run_planned=refuse)
    registry = discover(entry_of(broken), entry_of(other_api, "other"))
    assert [report.status for report in registry.reports] == ["broken", "incompatible"]
    registry.plugins.hook.stratagem_run_planned(plan=None)


# -- versions: of the plugin API, and of core


def installed_with(
    site: Site, monkeypatch: pytest.MonkeyPatch, *requirements: str, api_version: int = 1
) -> PluginReport:
    """The report on a distribution as pip leaves it behind, and what an unknown name is told."""
    monkeypatch.setitem(
        sys.modules, "plugin_module", plugin_of(strategy("mine", api_version=api_version))
    )
    site.install("stranger", *requirements)
    registry = discover(CORE, TORCH, *site.entries())
    if registry.reports[-1].status != "loaded":
        with pytest.raises(UnknownNameError) as caught:
            registry.find("strategy", "stranger")
        assert registry.reports[-1].reason in str(caught.value)
        assert any(
            registry.reports[-1].reason in line for line in problems_of(registry.reports, {}, ())
        )
    else:
        assert registry.find("strategy", "mine").distribution == "stranger"
    return registry.reports[-1]


def test_plugin_of_a_later_api_version_is_incompatible(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = installed_with(site, monkeypatch, api_version=3)
    assert (report.status, report.stage) == ("incompatible", "specs")
    assert report.reason == (
        "its strategy 'mine' was made for plugin API version 3, but stratagem-core "
        f"{__version__} has the versions 1 to 2: pip install --upgrade stratagem-core, or install "
        "a release of stranger made for version 2; docs/extend/plugin-api.md lists what has changed"
    )


def test_a_plugin_of_an_earlier_api_without_a_former_name_is_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_with(site, monkeypatch, api_version=1).status == "loaded"


def test_plugin_with_a_former_spec_argument_is_broken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("stranger")
    plugin = plugin_of(stratagem_components=lambda: [strategy("mine", objection="module:why")])
    monkeypatch.setitem(sys.modules, "plugin_module", plugin)
    report = discover(*site.entries()).reports[-1]
    assert report.status == "broken"
    assert report.reason == (
        "PluginError: StrategySpec(objection=...) is a former name, which nothing reads or calls: "
        "use incompatible_because; docs/extend/plugin-api.md lists the former names of the plugin "
        "API"
    )


@pytest.mark.parametrize("core", ["0.1.9", "0.2.0", "0.15.3", "1.0.0"])
def test_a_core_of_any_later_version_takes_a_plugin_of_its_api(
    core: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.discovery.registry.__version__", core)
    assert installed_with(site, monkeypatch, "stratagem-core>=0.1").status == "loaded"


def test_plugin_requiring_an_older_core_is_not_imported(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.discovery.registry.__version__", "0.2.0")
    report = installed_with(site, monkeypatch, "stratagem-core<0.2,>=0.1")
    assert (report.status, report.stage) == ("incompatible", "metadata")
    assert report.reason == (
        "requires stratagem-core<0.2,>=0.1, but stratagem-core 0.2.0 is installed: pip install "
        "--upgrade stranger stratagem-core"
    )


def test_a_name_is_claimed_once_by_all_plugins_of_a_distribution() -> None:
    report = report_of(
        entry_of(plugin_of(strategy("mine")), name="a"),
        entry_of(plugin_of(strategy("other", aliases=("MINE",))), name="b"),
    )
    assert (report.status, report.stage) == ("broken", "specs")
    assert "stranger provides the strategy name 'MINE' twice" in report.reason


def test_a_name_of_two_kinds_is_two_names() -> None:
    checkpoint = CheckpointIOSpec(name="mine", target="a:B", api_version=1)
    registry = discover(entry_of(plugin_of(strategy("mine"), checkpoint)))
    assert registry.find("strategy", "mine").spec.kind == "strategy"
    assert registry.find("checkpoint_io", "mine").spec.kind == "checkpoint_io"


def test_an_interrupt_is_nobodys_report() -> None:
    def load() -> object:
        raise KeyboardInterrupt

    entry = dataclasses.replace(entry_of(), load=load)
    with pytest.raises(KeyboardInterrupt):
        discover(entry)


# -- names


def test_names_are_found_whatever_their_case_and_by_alias() -> None:
    registry = discover(entry_of(plugin_of(strategy("Local_SGD", aliases=("lsgd",)))))
    for name in ("Local_SGD", "local_sgd", "LSGD", "stranger:lsgd", "Stranger:local_sgd"):
        assert registry.find("strategy", name).qualified_name == "stranger:Local_SGD"
    assert registry.names("strategy") == ["Local_SGD"]


def two_claimants() -> Registry:
    return discover(
        CORE,
        TORCH,
        entry_of(plugin_of(strategy("wanted"), strategy("only_first")), "first"),
        entry_of(plugin_of(strategy("x", aliases=("wanted",)), strategy("ddp")), "second"),
    )


def test_name_of_two_distributions_is_ambiguous_when_selected() -> None:
    registry = two_claimants()
    with pytest.raises(AmbiguousNameError) as caught:
        registry.find("strategy", "Wanted")
    text = str(caught.value)
    assert "the strategy 'Wanted' is provided by 2 distributions" in text
    assert "choose one by its qualified name: 'first:Wanted', 'second:Wanted'" in text
    assert registry.find("strategy", "second:wanted").spec.name == "x"
    assert registry.find("strategy", "only_first").distribution == "first"
    (key,) = registry.ambiguous()
    assert key == ("strategy", "wanted")


def test_both_claimants_are_listed() -> None:
    names = ("ddp", "only_first", "single_device", "wanted", "x")
    candidates = two_claimants().candidates("strategy")
    listed = [c.qualified_name for c in candidates if c.spec.name in names]
    assert listed == [
        "second:ddp",
        "stratagem-backend-torch:ddp",
        "first:only_first",
        "stratagem-core:single_device",
        "first:wanted",
        "second:x",
    ]


def test_a_reserved_name_stays_with_its_distribution() -> None:
    registry = two_claimants()
    assert registry.find("strategy", "ddp").distribution == "stratagem-backend-torch"
    assert registry.find("strategy", "second:ddp").distribution == "second"
    assert registry.reports[-1].notes == (
        "the strategy name 'ddp' is reserved for stratagem-backend-torch: reach this one as "
        "second:ddp",
    )


def test_core_comes_first_whatever_the_order_of_entries() -> None:
    registry = discover(entry_of(plugin_of(strategy("ddp")), "aaa"), TORCH, CORE)
    assert registry.find("strategy", "ddp").distribution == "stratagem-backend-torch"
    assert [report.distribution for report in registry.reports[:2]] == [
        "stratagem-core",
        "stratagem-backend-torch",
    ]
    assert [len(report.notes) for report in registry.reports] == [0, 0, 1]


def unknown(registry: Registry, name: str, kind: str = "strategy") -> str:
    with pytest.raises(UnknownNameError) as caught:
        registry.find(kind, name)
    assert isinstance(caught.value, LookupError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("single_devise", "single_device"),
        ("dpp", "ddp"),
        ("fdsp", "fsdp"),
        ("ddp_shraded", "ddp_sharded"),
        ("DDP_spwan", "ddp_spawn"),
    ],
)
def test_an_unknown_name_gives_the_one_that_was_meant(name: str, meant: str) -> None:
    assert unknown(discover(CORE, TORCH), name) == (
        f"unknown strategy {name!r}. Did you mean {meant!r}? "
        "`stratagem strategies` lists all that there are."
    )


def test_a_name_with_arguments_leads_to_the_class() -> None:
    assert unknown(discover(CORE, TORCH), "DDP(static_graph=True)") == (
        "unknown strategy 'DDP(static_graph=True)'. Did you mean 'ddp'? "
        "A name takes no arguments: pass an instance of its class."
    )


def test_unknown_name_lists_the_installed_names() -> None:
    text = unknown(discover(CORE, TORCH), "galactic")
    assert text.startswith("unknown strategy 'galactic'. Installed: ddp, ddp_fork, ")
    assert "find_unused_parameters" not in text


def test_unknown_name_without_any_plugin_lists_nothing() -> None:
    text = unknown(discover(), "anything", "checkpoint_io")
    assert text == "unknown checkpoint io 'anything'. Installed: none."


def test_unknown_qualifier_lists_the_distributions_with_the_name() -> None:
    text = unknown(two_claimants(), "third:wanted")
    assert "'third' provides none of that name; there is 'first:wanted', 'second:wanted'" in text


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        ("strategy", "deepspeed", "stratagem-backend-deepspeed"),
        ("strategy", "deepspeed_stage_3_offload", "stratagem-backend-deepspeed"),
        ("strategy", "DeepSpeed_Stage_2", "stratagem-backend-deepspeed"),
        ("strategy", "xla_fsdp", "stratagem-backend-xla"),
        ("strategy", "tpu_spawn", "stratagem-backend-xla"),
        ("strategy", "hpu_parallel", "stratagem-backend-hpu-ipu"),
        ("accelerator", "gpu", "stratagem-backend-cuda"),
        ("accelerator", "tpu", "stratagem-backend-xla"),
        ("precision", "16-mixed", "stratagem-backend-cuda"),
    ],
)
def test_known_name_names_the_distribution_to_install(
    kind: str, name: str, distribution: str
) -> None:
    text = unknown(discover(CORE, TORCH), name, kind)
    assert text.startswith(
        f"{kind} {name!r} needs {distribution}, which is not installed: pip install {distribution}."
        " Installed: "
    )


def test_a_name_of_a_known_third_party_says_so() -> None:
    text = unknown(discover(CORE, TORCH), "colossalai")
    assert "install a distribution that wraps the package 'colossalai'" in text
    assert "entry point in the group 'stratagem.backends'" in text


def test_known_name_of_an_installed_distribution_advises_an_upgrade() -> None:
    installed = entry_of(plugin_of(), "stratagem-backend-deepspeed")
    text = unknown(discover(CORE, TORCH, installed), "deepspeed_stage_1")
    assert (
        "stratagem-backend-deepspeed 1.0 is installed and provides no such name; if a later" in text
    )
    assert "pip install --upgrade stratagem-backend-deepspeed" in text


def test_a_plugin_that_failed_is_named_before_anything_is_installed() -> None:
    def load() -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    failed = dataclasses.replace(entry_of(distribution="stratagem-backend-deepspeed"), load=load)
    text = unknown(discover(CORE, TORCH, failed), "deepspeed_stage_3")
    assert "stratagem-backend-deepspeed 1.0 might provide it but is broken" in text
    assert "OSError: libcuda.so.1: cannot open shared object file" in text
    assert "pip install" not in text


def test_a_disabled_plugin_is_named_too() -> None:
    disabled = entry_of(distribution="someones-local-sgd")
    registry = discover(CORE, TORCH, disabled, STRATAGEM_DISABLE_PLUGINS="someones-local-sgd")
    text = unknown(registry, "local_sgd")
    assert "someones-local-sgd 1.0 might provide it but is disabled" in text
    assert "disabled by STRATAGEM_DISABLE_PLUGINS" in text


# -- the process's registry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with core's backend alone in the place of this process's."""
    registry = discover(CORE, TORCH)
    monkeypatch.setattr(registries, "_registry", registry)
    return registry


def test_discovery_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "_registry", None)
    first = registries.get_registry()
    assert registries.get_registry() is first


@pytest.mark.usefixtures("fresh")
class TestStrategyRegistry:
    def test_registered_strategy_is_found_built_and_removed(self) -> None:
        StrategyRegistry.register(
            "ddp_static", DDPStrategy, description="DDP, static graph", static_graph=True
        )
        assert {"ddp", "ddp_static", "single_device"} <= {*StrategyRegistry.available_strategies()}
        assert "ddp_static" in StrategyRegistry
        assert list(StrategyRegistry) == StrategyRegistry.available_strategies()

        built = StrategyRegistry.get("ddp_static")
        assert type(built) is DDPStrategy
        assert built.ddp_arguments["static_graph"] is True
        assert StrategyRegistry.get("ddp_static") is not built

        spec = registries.get_registry().find("strategy", "ddp_static").spec
        assert spec.summary == "DDP, static graph"
        assert getattr(spec, "capabilities", None) is DDPStrategy.capabilities

        StrategyRegistry.remove("ddp_static")
        assert "ddp_static" not in StrategyRegistry

    def test_registered_strategy_is_selected_by_name(self) -> None:
        from stratagem import Trainer

        StrategyRegistry.register("alone", SingleDeviceStrategy)
        plan = Trainer(strategy="alone", accelerator="cpu", logger=False).plan
        assert (plan.strategy.name, plan.strategy.provider.split()[0]) == (
            "alone",
            "registered-in-this-process",
        )

    def test_the_first_line_of_the_docstring_is_the_description(self) -> None:
        StrategyRegistry.register("alone", SingleDeviceStrategy)
        spec = registries.get_registry().find("strategy", "alone").spec
        assert spec.summary.startswith("Trains in a single process on one device")

    @pytest.mark.parametrize("name", ["ddp", "DDP", "mine"])
    def test_a_taken_name_is_refused(self, name: str) -> None:
        StrategyRegistry.register("mine", DDPStrategy)
        with pytest.raises(ConfigurationError, match="pass override=True") as caught:
            StrategyRegistry.register(name, SingleDeviceStrategy)
        assert f"the strategy name {name.casefold()!r} is taken by" in str(caught.value)

    def test_registry_override_holds_until_removal(self) -> None:
        StrategyRegistry.register("ddp", SingleDeviceStrategy, override=True)
        assert type(StrategyRegistry.get("ddp")) is SingleDeviceStrategy
        assert StrategyRegistry.available_strategies().count("ddp") == 1
        assert registries.get_registry().ambiguous() == {}
        StrategyRegistry.remove("DDP")
        assert type(StrategyRegistry.get("ddp")) is DDPStrategy

    def test_later_registration_wins_until_removal(self) -> None:
        StrategyRegistry.register("mine", DDPStrategy, timeout=1.0)
        StrategyRegistry.register("mine", DDPStrategy, override=True, timeout=2.0)
        registry = registries.get_registry()
        (listed,) = (c for c in registry.candidates("strategy") if c.spec.name == "mine")
        assert listed is registry.find("strategy", "mine")
        assert StrategyRegistry.get("mine").timeout == 2.0
        StrategyRegistry.remove("mine")
        assert StrategyRegistry.get("mine").timeout == 1.0
        StrategyRegistry.remove("mine")
        assert "mine" not in StrategyRegistry

    @pytest.mark.parametrize("name", ["ddp", "never_heard_of"])
    def test_registry_removes_only_names_registered_in_this_process(self, name: str) -> None:
        with pytest.raises(UnknownNameError, match="was not registered in this process") as caught:
            StrategyRegistry.remove(name)
        assert "STRATAGEM_DISABLE_PLUGINS" in str(caught.value)

    @pytest.mark.parametrize("given", [DDPStrategy.bind, object, "ddp", 3])
    def test_only_strategy_classes_are_registered(self, given: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            StrategyRegistry.register("mine", given)
        text = str(caught.value)
        assert "StrategyRegistry.register('mine', ...) expected a subclass of" in text
        assert f"received {given!r}" in text

    def test_an_instance_is_no_class(self) -> None:
        with pytest.raises(ConfigurationError, match="expected a subclass"):
            StrategyRegistry.register("mine", DDPStrategy())  # type: ignore[arg-type]

    def test_an_unknown_name_cannot_be_built(self) -> None:
        with pytest.raises(UnknownNameError, match="Did you mean 'ddp'"):
            StrategyRegistry.get("ddpp")


# -- the users' import names


def test_the_import_names_serve_classes_and_bases() -> None:
    from stratagem import accelerators, checkpoint, environments, precision, strategies

    served = {
        strategies: ("Strategy", "ParallelStrategy", "SingleDeviceStrategy", "DDPStrategy"),
        accelerators: ("Accelerator", "CPUAccelerator"),
        precision: ("Precision", "TruePrecision", "MixedPrecision"),
        checkpoint: ("CheckpointIO", "SingleFileCheckpointIO"),
        environments: ("ClusterEnvironment", "PlainEnvironment", "TorchElasticEnvironment"),
    }
    for module, names in served.items():
        for name in names:
            assert getattr(module, name).__name__ == name
            assert name in dir(module)


def test_unknown_class_lists_the_exports() -> None:
    from stratagem import strategies

    assert not hasattr(strategies, "NoSuchStrategy")
    with pytest.raises(AttributeError, match=r"It has: .*CheckpointIO, .*DDPStrategy, "):
        _ = strategies.NoSuchStrategy  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute '_private'"):
        _ = strategies._private  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fresh")
def test_class_of_a_missing_distribution_names_the_package() -> None:
    with pytest.raises(ImportError) as caught:
        from stratagem.strategies import DeepSpeedStrategy  # type: ignore[attr-defined]  # noqa: F401
    text = str(caught.value)
    assert "'stratagem.strategies' has no 'DeepSpeedStrategy'" in text
    assert "pip install stratagem-backend-deepspeed" in text


def serve(monkeypatch: pytest.MonkeyPatch, **plugins: object) -> None:
    entries = [entry_of(plugin, distribution) for distribution, plugin in plugins.items()]
    monkeypatch.setattr(registries, "_registry", discover(*entries, CORE, TORCH))


def test_a_class_of_core_is_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from stratagem import strategies

    other = strategy("other", target="somewhere.else:DDPStrategy")
    serve(monkeypatch, stranger=plugin_of(other))
    assert strategies.DDPStrategy is DDPStrategy


def test_a_class_that_two_provide_comes_from_its_own_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [strategy(f"s{n}", target=f"package{n}.module:Wanted") for n in (1, 2)]
    serve(monkeypatch, a=plugin_of(specs[0]), b=plugin_of(specs[1]))
    with pytest.raises(ImportError, match=r"one of package1\.module, package2\.module"):
        from stratagem.strategies import Wanted  # type: ignore[attr-defined]  # noqa: F401


def test_several_names_of_one_class_are_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from stratagem import strategies

    specs = [strategy(f"s{n}", target="collections:Counter") for n in (1, 2)]
    serve(monkeypatch, a=plugin_of(*specs))
    assert strategies.Counter.__name__ == "Counter"  # type: ignore[attr-defined]


def test_priorities_and_probes_are_part_of_a_spec() -> None:
    spec = AcceleratorSpec(name="mine", target="a:B", api_version=1, probe="a:probe", priority=3)
    assert (spec.kind, spec.priority, spec.probe) == ("accelerator", 3, "a:probe")


def test_capabilities_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().multi_node = True  # type: ignore[misc]


def test_alias_of_a_precision_is_hinted_for_precisions_only() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown precision 'half'\. Did you mean '16-true'"
    ):
        get_registry().find("precision", "half")
    with pytest.raises(UnknownNameError) as raised:
        get_registry().find("strategy", "half")
    assert "16-true" not in str(raised.value)
