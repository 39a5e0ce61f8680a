"""Plugins that break in each way that a plugin can: reported, and in nobody's way.

Each is a distribution as pip leaves it behind (a module and its metadata) in a folder on the path
of a process of its own, beside a plugin that is in order. One is built and installed as a wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Environment

SPEC = """\
from stratagem.discovery import StrategySpec, hookimpl

def spec(name, **options):
    options = {{"target": "stratagem.strategies:Strategy", "api_version": 1, **options}}
    return StrategySpec(name=name, **options)

@hookimpl
def stratagem_components():
    return {specs}
"""


def returning(specs: str) -> str:
    """A plugin module whose components are what an expression says."""
    return SPEC.format(specs=specs)


@dataclass(frozen=True)
class Plugin:
    """A distribution with one entry point, and what its report has to say.

    Attributes:
        source: text of its plugin module.
        status, stage: of its report.
        reason: parts of the reason.
        notes: parts of its notes.
        requires: its requirement on core.
        object: what the entry point names in the module, after a colon.
        environ: variables to set.
    """

    source: str
    status: str = "broken"
    stage: str = ""
    reason: Sequence[str] = ()
    notes: Sequence[str] = ()
    requires: str = "stratagem-core<0.2,>=0.1"
    object: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


GOOD = Plugin(returning('[spec("in_order")]'), status="loaded")
WANTED = returning('[spec("wanted")]')

CASES = {
    "import_error": Plugin(
        "import vendor_sdk",
        stage="import",
        reason=["ModuleNotFoundError", "No module named 'vendor_sdk'"],
    ),
    "missing_library": Plugin(
        "import ctypes; ctypes.CDLL('libvendor_driver.so.1')",
        stage="import",
        reason=["OSError", "libvendor_driver.so.1"],
    ),
    "exits": Plugin(
        "import sys; sys.exit('no licence was found')",
        stage="import",
        reason=["SystemExit: no licence was found"],
    ),
    "own_base_exception": Plugin(
        "class NoDevice(BaseException): ...\nraise NoDevice('the driver is gone')",
        stage="import",
        reason=["NoDevice: the driver is gone"],
    ),
    "syntax_error": Plugin("def:", stage="import", reason=["SyntaxError"]),
    "missing_object": Plugin(
        WANTED, object="plugin", stage="import", reason=["AttributeError", "'plugin'"]
    ),
    "wrong_signature": Plugin(
        "from stratagem.discovery import hookimpl\n@hookimpl\ndef stratagem_components(req): ...",
        stage="hooks",
        reason=["PluginValidationError", "stratagem_components", "req"],
    ),
    "unknown_hook": Plugin(
        "from stratagem.discovery import hookimpl\n@hookimpl\ndef stratagem_componets(): ...",
        stage="hooks",
        reason=["'stratagem_componets', which is not a hook", "hooks are", "stratagem_components"],
    ),
    "undecorated": Plugin(
        "def stratagem_components(): return ()",
        stage="hooks",
        reason=["it implements no hook", "decorated with stratagem.discovery.hookimpl"],
    ),
    "object_without_hooks": Plugin(
        WANTED,
        object="stratagem_components",
        stage="hooks",
        reason=["it implements no hook", "its entry point names 'stratagem_components' in the mod"],
    ),
    "hook_raises": Plugin(returning("1 / 0"), stage="specs", reason=["ZeroDivisionError"]),
    "returns_nothing": Plugin(
        returning("None"), stage="specs", reason=["returned None", "expected an iterable"]
    ),
    "returns_a_spec": Plugin(
        returning('spec("wanted")'),
        stage="specs",
        reason=["returned the strategy spec 'wanted'; expected an iterable", "yield each of them"],
    ),
    "endless_components": Plugin(
        returning('(spec(f"name_{i}") for i in __import__("itertools").count())'),
        stage="specs",
        reason=["returned more than 10000 components"],
    ),
    "not_a_spec": Plugin(
        returning('["wanted"]'), stage="specs", reason=["'wanted'", "expected ComponentSpec"]
    ),
    "bad_name": Plugin(
        returning('[spec("my strategy")]'),
        stage="specs",
        reason=["the name 'my strategy'", "expected letters"],
    ),
    "name_of_no_choice": Plugin(
        returning('[spec("wanted", aliases=("Auto",))]'),
        stage="specs",
        reason=["the name 'Auto', by which users leave the choice to Stratagem"],
    ),
    "bad_target": Plugin(
        returning('[spec("wanted", target="my_package.MyStrategy")]'),
        stage="specs",
        reason=["target='my_package.MyStrategy'", "expected 'package.module:Class'"],
    ),
    "unknown_field": Plugin(
        returning('[spec("wanted", colour="red")]'), stage="specs", reason=["TypeError", "colour"]
    ),
    "name_twice": Plugin(
        returning('[spec("wanted"), spec("other", aliases=("Wanted",))]'),
        stage="specs",
        reason=["provides the strategy name 'Wanted' twice"],
    ),
    "other_api": Plugin(
        returning('[spec("wanted", api_version=99)]'),
        status="incompatible",
        stage="specs",
        reason=["plugin API version 99", "has the versions 1 to", "install a release of"],
    ),
    "other_core": Plugin(
        "raise RuntimeError('it was imported')",
        status="incompatible",
        stage="metadata",
        reason=["requires stratagem-core>=7", "is installed: pip install --upgrade"],
        requires="stratagem-core>=7",
    ),
    "unreadable_requirement": Plugin(
        "raise RuntimeError('it was imported')",
        status="incompatible",
        stage="metadata",
        reason=["its requirement stratagem-core", "cannot be read"],
        requires="stratagem-core >=banana",
    ),
    "disabled_by_distribution": Plugin(
        "raise RuntimeError('it was imported')",
        status="disabled",
        stage="environment",
        reason=["disabled by STRATAGEM_DISABLE_PLUGINS"],
        environ={"STRATAGEM_DISABLE_PLUGINS": "something, Stratagem_Disabled.By-Distribution"},
    ),
    "disabled_by_entry_point": Plugin(
        "raise RuntimeError('it was imported')",
        status="disabled",
        stage="environment",
        reason=["disabled by STRATAGEM_DISABLE_PLUGINS"],
        environ={"STRATAGEM_DISABLE_PLUGINS": "plugin_of_disabled_by_entry_point"},
    ),
    "left_out": Plugin(
        "raise RuntimeError('it was imported')",
        status="disabled",
        stage="environment",
        reason=["left out of STRATAGEM_ONLY_PLUGINS"],
        environ={"STRATAGEM_ONLY_PLUGINS": "stratagem-zz-in-order,stratagem-extras"},
    ),
    "reserved_name": Plugin(
        returning('[spec("ddp"), spec("wanted", aliases=("single_device",))]'),
        status="loaded",
        notes=[
            "strategy name 'ddp' is reserved for stratagem-backend-torch",
            "reach this one as stratagem-reserved-name:ddp",
            "strategy name 'single_device' is reserved",
        ],
    ),
    "imports_torch": Plugin(
        f"import torch\n{WANTED}",
        status="loaded",
        notes=[
            "module_of_imports_torch imports torch (",
            "import it in the modules that",
        ],
    ),
    "slow": Plugin(f"import time; time.sleep(0.3)\n{WANTED}", status="loaded"),
}


def distribution_of(case: str) -> str:
    return "stratagem-" + case.replace("_", "-")


def install(folder: Path, case: str, plugin: Plugin) -> None:
    """Write a distribution as pip leaves it behind."""
    name = distribution_of(case)
    module = f"module_of_{case}"
    # It leaves a trace of having been imported.
    trace = f"open({str(folder / f'{case}.imported')!r}, 'w').close()\n"
    (folder / f"{module}.py").write_text(trace + plugin.source)
    info = folder / f"{name.replace('-', '_')}-3.2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 3.2.1\nRequires-Dist: torch>=2.9\n"
        f"Requires-Dist: {plugin.requires}\n\nRequires-Dist: stratagem-core>=9 (its readme)\n"
    )
    value = f"{module}:{plugin.object}" if plugin.object else module
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nother = other:main\n\n"
        f"[stratagem.backends]\nplugin_of_{case} = {value}\n"
    )


def run(
    folder: Path, *arguments: str, expect: int = 0, environ: Mapping[str, str] | None = None
) -> str:
    """Run Python with a folder's distributions on its path; return what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STRATAGEM_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**clean, "PYTHONPATH": str(folder), **(environ or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if expect else "")


LOOK = """
import json, sys
from dataclasses import asdict
import stratagem
names = stratagem.StrategyRegistry.available_strategies()
from stratagem.discovery.registry import get_registry
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolution import resolve
plan = resolve(RunRequest(strategy="single_device", accelerator="cpu"), get_registry())
print(json.dumps({
    "names": names,
    "reports": {report.distribution: asdict(report) for report in get_registry().reports},
    "plan": plan.strategy.provider,
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Plugin]:
    """A name of the table and its plugin, installed in tmp_path beside one that is in order."""
    name: str = request.param
    install(tmp_path, name, CASES[name])
    install(tmp_path, "zz_in_order", GOOD)
    return name, CASES[name]


def test_broken_plugin_is_reported_and_skipped(case: tuple[str, Plugin], tmp_path: Path) -> None:
    name, plugin = case
    seen = json.loads(run(tmp_path, "-c", LOOK, environ=plugin.environ))

    assert seen["plan"].startswith("stratagem-core ")
    assert {"ddp", "single_device", "in_order"} <= set(seen["names"])
    assert ("wanted" in seen["names"]) == (plugin.status == "loaded")
    assert seen["torch"] is (name == "imports_torch")

    report = seen["reports"][distribution_of(name)]
    assert (report["status"], report["stage"]) == (plugin.status, plugin.stage)
    assert (report["version"], report["entry_point"]) == ("3.2.1", f"plugin_of_{name}")
    assert bool(report["reason"]) == (plugin.status != "loaded")
    for part in plugin.reason:
        assert part in report["reason"]
    for part in plugin.notes:
        assert part in "\n".join(report["notes"])
    assert ("Traceback" in report["detail"]) == (plugin.status == "broken")
    if plugin.status in ("disabled", "incompatible") and plugin.stage != "specs":
        assert not (tmp_path / f"{name}.imported").exists()


def test_doctor_shows_a_broken_plugin(case: tuple[str, Plugin], tmp_path: Path) -> None:
    name, plugin = case
    failed = plugin.status in ("broken", "incompatible") or bool(plugin.notes)
    doctor = ("-m", "stratagem", "doctor", "--json")
    diagnosis = json.loads(run(tmp_path, *doctor, expect=int(failed), environ=plugin.environ))
    (shown,) = (p for p in diagnosis["plugins"] if p["distribution"] == distribution_of(name))
    assert shown["status"] == plugin.status
    problems = [line for line in diagnosis["problems"] if distribution_of(name) in line]
    assert bool(problems) == failed
    if failed:
        for part in (*plugin.reason, *plugin.notes):
            assert part in "\n".join(problems)
    assert shown["slow"] or name != "slow"


@pytest.mark.parametrize("command", ["doctor", "strategies"])
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import os; os._exit(3)", 3),
        ("import os; os._exit(0)", 1),  # not as if no problem had been found
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_plugin_that_ends_the_process_is_named(
    command: str, source: str, code: int, tmp_path: Path
) -> None:
    install(tmp_path, "ends", Plugin(source))
    install(tmp_path, "zz_in_order", GOOD)
    process = start(tmp_path, command)
    assert process.communicate(timeout=60) == (
        "",
        "stratagem: the plugin stratagem-ends (plugin_of_ends) ended the process. To go without "
        "this plugin, set STRATAGEM_DISABLE_PLUGINS=stratagem-ends\n",
    )
    assert process.returncode == code
    environ = {"STRATAGEM_DISABLE_PLUGINS": "stratagem-ends"}
    assert "in_order" in run(tmp_path, "-m", "stratagem", "strategies", environ=environ)


def test_a_plugin_that_crashes_is_shown_with_its_file(tmp_path: Path) -> None:
    install(tmp_path, "crashes", Plugin("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    process = start(tmp_path, "strategies")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -11
    assert "Segmentation fault" in said
    assert f'File "{tmp_path}/module_of_crashes.py", line 2 in <module>' in said


def test_a_plugin_that_does_not_return_is_shown_with_its_file(tmp_path: Path) -> None:
    install(tmp_path, "waits", Plugin("import time; time.sleep(600)"))
    process = start(tmp_path, "doctor")
    assert process.stderr is not None
    assert process.stderr.readline() == "Timeout (0:00:10)!\n"
    said = iter(process.stderr.readline, "")
    assert any(f'File "{tmp_path}/module_of_waits.py", line 2 in <module>' in s for s in said)
    assert next(line for line in said if line.startswith("stratagem: ")) == (
        "stratagem: the plugin stratagem-waits (plugin_of_waits) has not returned yet. To go "
        "without this plugin, set STRATAGEM_DISABLE_PLUGINS=stratagem-waits\n"
    )
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.parametrize("command", ["doctor", "strategies"])
def test_output_of_a_plugin_is_truncated(command: str, tmp_path: Path) -> None:
    flood = (
        "import sys\nfor file in (sys.stdout, sys.stderr):\n    print('flood ' * 10**6, file=file)"
    )
    install(tmp_path, "floods", Plugin(f"{flood}\nfor _ in range(10**5): print('flood')"))
    install(tmp_path, "zz_in_order", Plugin(f"print('one line')\n{GOOD.source}", status="loaded"))
    for said in start(tmp_path, command).communicate(timeout=60):
        assert said.startswith("flood flood")
        assert said.count("flood ") < 2000
        assert "\nstratagem: what else the plugin prints is left out\n" in said
        assert len(said) < 40_000
        assert ("\none line\n" in said) == ("usable here" in said)


def start(folder: Path, command: str) -> subprocess.Popen[str]:
    """Start a command with a folder's distributions on its path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STRATAGEM_")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "stratagem", command],
        env={**clean, "PYTHONPATH": str(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e"


def test_text_of_a_plugin_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters in metadata, summaries, errors and checks are escaped."""
    monkeypatch.setenv("COLUMNS", "300")  # tables wrap no text
    install(tmp_path, "hostile", Plugin(returning(f'[spec("wanted", summary={HOSTILE!r})]')))
    install(tmp_path, "raises", Plugin(f"raise ImportError({HOSTILE!r} + 'x' * 1_000_000)"))
    checks = f"""
from stratagem.discovery import Check, hookimpl
@hookimpl
def stratagem_doctor():
    yield Check({HOSTILE!r}, "error", {HOSTILE!r} + "\\nstratagem: all is well")
"""
    install(tmp_path, "checks", Plugin(checks))
    for case in ("hostile", "raises", "checks"):
        info = tmp_path / f"stratagem_{case}-3.2.1.dist-info"
        for file in ("METADATA", "entry_points.txt"):
            text = (info / file).read_text()
            text = text.replace("3.2.1", f"3.2.1{HOSTILE}").replace("of_", f"of_{HOSTILE}", 1)
            (info / file).write_text(text.replace(f"module_of_{HOSTILE}", "module_of_"))
    for arguments in (["doctor"], ["doctor", "--verbose"], ["strategies"], ["nothing"]):
        code = {"doctor": 1, "nothing": 2}.get(arguments[0], 0)
        said = run(tmp_path, "-m", "stratagem", *arguments, expect=code)
        assert said.replace("\n", "").isprintable()
        assert "\nstratagem: all is well" not in said
        assert len(said) < 100_000
        assert arguments == ["nothing"] or "\\x1b]0;title\\x07\\x1b[2J\\u202e" in said
    for case, environ in (
        ("hostile", {}),
        ("raises", {}),
        ("hostile", {"STRATAGEM_DISABLE_PLUGINS": "stratagem-hostile"}),
    ):
        doctor = ("doctor", "--verbose", f"stratagem-{case}")
        said = run(tmp_path, "-m", "stratagem", *doctor, expect=1, environ=environ)
        assert said.replace("\n", "").isprintable()
        assert "3.2.1\\x1b]0;title\\x07\\x1b[2J\\u202e" in said


def test_a_slow_import_is_reported_with_its_seconds(tmp_path: Path) -> None:
    install(tmp_path, "slow", CASES["slow"])
    report = json.loads(run(tmp_path, "-c", LOOK))["reports"]["stratagem-slow"]
    assert 0.3 <= report["seconds"] < 30


def test_with_all_of_them_at_once_a_model_trains(tmp_path: Path) -> None:
    for name, plugin in CASES.items():
        if not plugin.environ:
            install(tmp_path, name, plugin)
    script = """
import torch
from stratagem import Lite, Trainer
Trainer(strategy="single_device", accelerator="cpu", logger=False, enable_checkpointing=False)
lite = Lite(accelerator="cpu")
lite.launch()
model = torch.nn.Linear(2, 1)
model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
lite.backward(model(torch.ones(1, 2)).square().sum())
optimizer.step()
print(lite.plan.strategy.provider)
"""
    assert run(tmp_path, "-c", script).startswith("stratagem-core ")


def test_an_unknown_name_is_traced_to_the_plugin_that_failed(tmp_path: Path) -> None:
    install(tmp_path, "wonder_parallel", CASES["import_error"])
    code = """
from stratagem.discovery.registry import get_registry
try:
    get_registry().find("strategy", "wonder_parallel_2")
except LookupError as error:
    print(error)
"""
    text = run(tmp_path, "-c", code)
    assert "unknown strategy 'wonder_parallel_2'" in text
    assert "stratagem-wonder-parallel 3.2.1 might provide it but is broken" in text
    assert "No module named 'vendor_sdk'" in text
    assert "`stratagem strategies` lists all that there are." in text


def test_unknown_name_lists_broken_plugins(tmp_path: Path) -> None:
    install(tmp_path, "averaging", CASES["wrong_signature"])
    explain = ("-m", "stratagem", "explain", "--strategy", "wanted")
    text = run(tmp_path, *explain, expect=2)
    assert "unknown strategy 'wanted'" in text
    assert "stratagem-averaging 3.2.1 is broken, and nothing that it provides is known: " in text
    assert "PluginValidationError" in text


def test_entry_point_in_a_misspelled_group_is_reported(tmp_path: Path) -> None:
    groups = ("stratagem.plugins", "stratagem.backend", "Stratagem.Backends", "strategem.backends")
    expected = []
    for number, group in enumerate(groups):
        case = f"number_{number}"
        install(tmp_path, case, Plugin(WANTED))
        (declared,) = tmp_path.glob(f"*{case}-*.dist-info/entry_points.txt")
        declared.write_text(declared.read_text().replace("stratagem.backends", group))
        expected.append(
            f"stratagem-number-{number} declares the entry point 'plugin_of_{case}' in the group "
            f"{group!r}, which nobody reads: expected the group 'stratagem.backends'."
        )
    wanted = ("-m", "stratagem", "explain", "--strategy", "wanted")
    unknown = run(tmp_path, *wanted, expect=2)
    doctor = run(tmp_path, "-m", "stratagem", "doctor", expect=1)
    for text in expected:
        assert text in unknown
        assert text in doctor


# What specs promise and is not so: the spec, what its class's module holds, and what doctor says.
# All in one process, each under a name of its own.

PROMISES = {
    "launcher": (
        'capabilities=Capabilities(launchers=("scirpt",), one_process=False)',
        "it names a launcher that cannot be found: unknown launcher 'scirpt'.",
    ),
    "preset_launcher": (
        'init_args={"launcher": "spwan"}',
        "it names a launcher that cannot be found: unknown launcher 'spwan'.",
    ),
    "checkpoint_io": (
        'capabilities=Capabilities(checkpoint_io="one_file")',
        "it names a checkpoint io that cannot be found: unknown checkpoint io 'one_file'",
    ),
    "accelerator": (
        'capabilities=Capabilities(accelerators=("cdua",))',
        "it names an accelerator that cannot be found: unknown accelerator 'cdua'",
    ),
    "precision": (
        'capabilities=Capabilities(precisions=("bf16-mixt",))',
        "it names a precision that cannot be found: unknown precision 'bf16-mixt'",
    ),
    "module": (
        'target="module_of_nothing.strategy:Mine"',
        "its target 'module_of_nothing.strategy:Mine' cannot be found: ModuleNotFoundError",
    ),
    "missing_sdk": (
        'target="classes_of_missing_sdk:Mine"',
        "its target's module classes_of_missing_sdk imports vendor_sdk and vendor_tools, which is "
        "not installed",
    ),
    "attribute": (
        'target="module_of_attribute:Mine"',
        "its target's module module_of_attribute defines no 'Mine'",
    ),
}
CLASSES = {
    "another": (
        "Capabilities(one_process=False, many_devices=True, launchers=None)",
        "class Mine(DDPStrategy):\n    capabilities = Capabilities(many_devices=True)",
        "the spec's capabilities and those of Mine differ (launchers=None and ('in_process',); "
        "one_process=False and True): let both hold one object",
    ),
    "another_object": (
        'Capabilities(parameters="drift")',
        "from module_of_another_object import OTHER\n"
        "class Mine(SingleDeviceStrategy):\n    capabilities = OTHER",
        "the spec's capabilities and those of Mine differ (parameters='drift' and 'same'; "
        "allows_uneven_eval=True and False): let both hold one object",
    ),
    "inherited": (
        "Capabilities()",
        "class Mine(DDPStrategy):\n    rounds = 0",
        "the spec's capabilities and those of Mine differ (launchers=('in_process',) and None; "
        "one_process=True and False; many_devices=False and True; multi_node=False and True): let "
        "both hold one object",
    ),
    "none": (
        "Capabilities()",
        "class Mine(Strategy):\n    rounds = 0",
        "Mine has no capabilities: set them in the class, to the object that its spec has",
    ),
    "clipping": (
        "Capabilities(engine_clips=True)",
        "class Mine(Strategy):\n    capabilities = Capabilities(engine_clips=True)",
        "Mine.capabilities has engine_clips=True, but the class overrides none of train_step, "
        "finish_step, optimizer_step, clip_gradients, so that nothing of its own clips: leave "
        "engine_clips out, or clip in one of them",
    ),
    "backward": (
        "Capabilities(manual_backward=False)",
        "class Mine(Strategy):\n    capabilities = Capabilities(manual_backward=False)",
        "Mine.capabilities has manual_backward=False, but the class overrides none of train_step, "
        "accumulate_all, accumulate, backward, so that it runs backward as user code does: leave "
        "manual_backward out, or override one of them",
    ),
    "following": (
        "Capabilities(follows_evaluation=True)",
        "class Mine(Strategy):\n    capabilities = Capabilities(follows_evaluation=True)",
        "Mine.capabilities has follows_evaluation=True, but the class overrides none of "
        "follow_evaluation_step, so that ranks without a batch leave the others waiting: leave "
        "follows_evaluation out, or override one of them",
    ),
    "processes": (
        "Capabilities(many_devices=True)",
        "class Mine(ParallelStrategy):\n    capabilities = Capabilities(many_devices=True)",
        "Mine.capabilities has one_process=True and many_devices=True, but a ParallelStrategy has "
        "a process for each device: set one_process=False",
    ),
}
PROBE = """
from stratagem.discovery import AcceleratorSpec, hookimpl

@hookimpl
def stratagem_components():
    target = "stratagem.one_device.accelerators:CPUAccelerator"
    probe = "module_of_probe:look"
    return [AcceleratorSpec(name="probe", target=target, probe=probe, api_version=1)]
"""
# Nothing is wrong: what another distribution of ours provides need not be installed.
RIGHT = """\
class Mine(ParallelStrategy):
    '''Steps as its engine does.'''

    capabilities = OTHER

    def train_step(self, prepared, step, micro_batches):
        self.engine.run(step)
"""


def with_class(case: str, can: str) -> str:
    """A plugin module with one strategy, whose class lies in a module of its own."""
    other = (
        "Capabilities(accelerators=('cuda', 'gpu'), precisions=('16-mixed', '32-true'), "
        "launchers=None, one_process=False, many_devices=True, manual_backward=False)"
        if case == "right"
        else "Capabilities(allows_uneven_eval=False)"
    )
    text = f"from stratagem.discovery import Capabilities\nOTHER = {other}\n"
    spec = f'spec({case!r}, target="classes_of_{case}:Mine", capabilities={can})'
    return text + returning(f"[{spec}]")


@pytest.fixture(scope="module")
def promises(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What doctor says where all of these are installed."""
    folder = tmp_path_factory.mktemp("promises")
    kinds = {case: (can, kind) for case, (can, kind, _) in CLASSES.items()}
    kinds["right"] = ("OTHER", "from module_of_right import OTHER\n" + RIGHT)
    for case, (options, _) in PROMISES.items():
        source = f"[spec({case!r}, {options})]"
        install(
            folder,
            case,
            Plugin("from stratagem.discovery import Capabilities\n" + returning(source)),
        )
    for case, (can, kind) in kinds.items():
        install(folder, case, Plugin(with_class(case, can)))
        (folder / f"classes_of_{case}.py").write_text(
            "import torch\nfrom stratagem.discovery import Capabilities\nfrom stratagem.strategies "
            "import (\n    DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy,\n)\n\n"
            f"{kind}\n\nclass Other:\n    capabilities = None\n"
        )
    (folder / "classes_of_missing_sdk.py").write_text(
        "import os, torch\nimport vendor_sdk.api as api\nfrom vendor_tools import tool\ntry:\n"
        "    import vendor_extra\nexcept ImportError:\n    vendor_extra = None\n\nclass Mine: ...\n"
    )
    install(folder, "probe", Plugin(PROBE))
    diagnosis = json.loads(run(folder, "-m", "stratagem", "doctor", "--json", expect=1))
    problems: list[str] = diagnosis["problems"]
    return problems


@pytest.mark.parametrize("mistake", PROMISES)
def test_doctor_reports_missing_targets_of_a_spec(mistake: str, promises: list[str]) -> None:
    who, expected = f"{distribution_of(mistake)}: strategy {mistake!r}: ", PROMISES[mistake][1]
    (problem,) = (line for line in promises if line.startswith(who))
    assert problem.startswith(f"{who}{expected}")


def test_doctor_finds_a_probe_that_is_not_there(promises: list[str]) -> None:
    assert (
        "stratagem-probe: accelerator 'probe': its probe's module module_of_probe defines no 'look'"
    ) in promises


@pytest.mark.parametrize("mistake", CLASSES)
def test_doctor_finds_a_class_that_contradicts_its_spec(mistake: str, promises: list[str]) -> None:
    who = f"{distribution_of(mistake)}: strategy {mistake!r}: "
    assert [line for line in promises if line.startswith(who)] == [who + CLASSES[mistake][2]]


def test_doctor_reports_no_problem_of_good_specs(promises: list[str]) -> None:
    assert [line for line in promises if "right" in line] == []


# -- two distributions, one name

TWO = {
    "first": Plugin(returning('[spec("wanted", summary="the first")]')),
    "second": Plugin(returning('[spec("wanted", summary="the second")]')),
}


def test_name_of_two_plugins_is_ambiguous_only_when_selected(tmp_path: Path) -> None:
    for name, plugin in TWO.items():
        install(tmp_path, name, plugin)
    seen = json.loads(run(tmp_path, "-c", LOOK))
    assert seen["reports"]["stratagem-first"]["status"] == "loaded"
    assert seen["reports"]["stratagem-second"]["status"] == "loaded"

    explain = ("-m", "stratagem", "explain", "--strategy")
    text = run(tmp_path, *explain, "wanted", expect=2)
    assert "'wanted' is provided by 2 distributions" in text
    assert "'stratagem-first:wanted', 'stratagem-second:wanted'" in text

    plan = run(tmp_path, *explain, "stratagem-second:wanted", "--accelerator", "cpu")
    assert "stratagem-second 3.2.1" in plan

    doctor = ("-m", "stratagem", "doctor", "--json")
    diagnosis = json.loads(run(tmp_path, *doctor, expect=1))
    assert diagnosis["ambiguous"] == [
        {
            "kind": "strategy",
            "name": "wanted",
            "choices": ["stratagem-first:wanted", "stratagem-second:wanted"],
        }
    ]


def test_a_reserved_name_stays_with_its_distribution_and_the_qualified_one_works(
    tmp_path: Path,
) -> None:
    install(tmp_path, "reserved_name", CASES["reserved_name"])
    explain = ("-m", "stratagem", "explain", "--accelerator", "cpu", "--devices", "1")
    first = run(tmp_path, *explain, "--strategy", "ddp").splitlines()[0]
    assert "stratagem-backend-torch" in first
    code = (
        "import warnings; from stratagem import Lite; warnings.simplefilter('error');"
        "Lite(accelerator='cpu', devices=2, strategy='ddp')"
    )
    warned = run(tmp_path, "-c", code, expect=1)
    assert "UserWarning: the strategy 'ddp' is that of stratagem-backend-torch" in warned
    assert "'stratagem-reserved-name:ddp' is another one" in warned
    qualified = run(tmp_path, *explain, "--strategy", "stratagem-reserved-name:ddp")
    assert "stratagem-reserved-name 3.2.1" in qualified.splitlines()[0]


def test_a_plugin_sorted_before_core_does_not_take_a_reserved_name(tmp_path: Path) -> None:
    install(tmp_path, "aa", CASES["reserved_name"])  # "stratagem-aa" < "stratagem-backend-torch"
    code = """
from stratagem.discovery.registry import get_registry
print(get_registry().find("strategy", "ddp").distribution)
print([report.notes for report in get_registry().reports if report.entry_point == "plugin_of_aa"])
"""
    first, notes = run(tmp_path, "-c", code).splitlines()
    assert first == "stratagem-backend-torch"
    assert "reach this one as stratagem-aa:ddp" in notes


# -- as wheels


@pytest.mark.wheels
@pytest.mark.slow
def test_a_wheel_that_breaks_at_import_is_reported(
    wheelhouse: Path,
    new_environment: Callable[..., Environment],
    build_wheel: Callable[[Path, Path], Path],
    tmp_path: Path,
) -> None:
    package = tmp_path / "stratagem-broken"
    source = package / "src" / "stratagem_broken"
    source.mkdir(parents=True)
    (package / "pyproject.toml").write_text("""
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "stratagem-broken"
version = "3.2.1"
dependencies = ["stratagem-core>=0.1,<0.2"]

[project.entry-points."stratagem.backends"]
broken = "stratagem_broken.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/stratagem_broken"]
""")
    (source / "__init__.py").touch()
    (source / "plugin.py").write_text(CASES["missing_library"].source)
    (core,) = wheelhouse.glob("stratagem_core-*.whl")
    environment = new_environment("broken_wheel", core, build_wheel(package, tmp_path / "wheels"))

    seen: dict[str, Any] = json.loads(environment.python("-c", LOOK))
    report = seen["reports"]["stratagem-broken"]
    assert (report["version"], report["status"], report["stage"]) == ("3.2.1", "broken", "import")
    assert "libvendor_driver.so.1" in report["reason"]
    assert "single_device" in seen["names"]
