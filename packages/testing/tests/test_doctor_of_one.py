"""`stratagem doctor NAME`: what keeps one distribution from working, for its author."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from program import CORE, Program

from stratagem import __version__
from stratagem_testing.author.doctor import Examination, ExaminedComponent, print_examination

RANGE = f"{CORE}<0.2,>=0.1"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path)
    made.variables["COLUMNS"] = "400"  # one line for each row
    return made


def row_of(table: str, first: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.split("  ")[0] == first]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


GOOD = """
    from stratagem.discovery import Capabilities, StrategySpec, hookimpl

    CAN = Capabilities(launchers=None, one_process=False, many_devices=True)

    @hookimpl
    def stratagem_components():
        return [StrategySpec(name="averaging", target="averaging_classes:Averaging", api_version=1,
                             capabilities=CAN)]
"""
CLASSES = """
    from averaging import CAN
    from stratagem.strategies import ParallelStrategy

    print("imported, and said so")

    class Averaging(ParallelStrategy):
        capabilities = CAN
"""
NOTHING = """
    from stratagem.discovery import hookimpl

    @hookimpl
    def stratagem_components():
        return []
"""


def write(program: Program, module: str, code: str) -> None:
    program.folder.joinpath(f"{module}.py").write_text(textwrap.dedent(code))


# -- what is in order


def test_doctor_reports_a_good_distribution(program: Program) -> None:
    program.install("averaging", GOOD, requires=RANGE)
    write(program, "averaging_classes", CLASSES)
    done = program("doctor", "averaging")
    # What an import prints goes elsewhere, so that --json is JSON.
    assert done.stdout.startswith("averaging 1.5\n")
    assert done.stderr == "imported, and said so\n"
    assert row_of(done.stdout, "version") == ["version", "ok", "1.5"]
    assert row_of(done.stdout, "requirement on core")[1:] == ["ok", RANGE]
    assert row_of(done.stdout, "entry point plug")[1] == "ok"
    assert "averaging takes 0." in row_of(done.stdout, "plugin plug")[2]
    assert row_of(done.stdout, "strategy 'averaging'")[1:] == [
        "ok",
        "averaging_classes:Averaging is there and agrees with its spec",
    ]
    assert row_of(done.stdout, "strategy") == ["strategy", "averaging", "yes"]
    assert done.stdout.endswith("\nNo problem found.\n")


def test_doctor_accepts_the_name_of_an_entry_point(program: Program) -> None:
    program.install("averaging", NOTHING, requires=RANGE)
    found = program.json("doctor", "plug")
    assert (found["ok"], found["problems"]) == (True, [])
    assert (found["distribution"], found["version"]) == ("averaging", "1.5")


def test_entry_point_named_as_another_library_is_accepted(program: Program) -> None:
    info = program.install("averaging", NOTHING, requires=RANGE)
    info.joinpath("entry_points.txt").write_text("[stratagem.backends]\npytest = averaging\n")
    assert program.json("doctor", "pytest")["distribution"] == "averaging"
    found = program.json("doctor", "pluggy", code=1)
    assert found["problems"][0].startswith("entry points: it declares none in the group")


# -- what an import does besides


def test_doctor_ignores_atexit_functions_and_threads_of_a_plugin(program: Program) -> None:
    program.install(
        "averaging",
        "import atexit\nimport threading\n\n"
        'atexit.register(print, "farewell")\n'
        "threading.Timer(60, print).start()\n"
        f"{textwrap.dedent(NOTHING)}",
        requires=RANGE,
    )
    code = "import os, sys; from stratagem.cli import main; code = main(); "
    code += "sys.stdout.flush(); os._exit(code)"  # it has the plugin's thread itself
    done = program.python("-c", code, "doctor", "averaging")
    assert (done.returncode, done.stderr) == (0, "")
    status, detail = row_of(done.stdout, "plugin plug")[1:]
    assert status == "warning"
    assert detail.startswith("importing averaging changes threads: every program that uses")


def test_failed_import_of_a_plugin_alone_is_a_problem(program: Program) -> None:
    program.install(
        "averaging",
        "import os\nimport sys\n\n"
        'if "-c" in sys.argv[:1]:\n    print("going")\n    sys.exit(0)\n'
        f"{textwrap.dedent(NOTHING)}",
        requires=RANGE,
    )
    assert program.json("doctor", "averaging", code=1)["problems"] == [
        "plugin plug: importing averaging alone fails: SystemExit: 0"
    ]


# -- classes that are not what their specs say

MISTAKES = {
    "missing": ("averaging_nowhere:Mine", "", "", "cannot be imported: ModuleNotFoundError"),
    "needs_sdk": ("averaging_sdk:Mine", "", "", "(vendor_sdk has to be installed beside it)"),
    "no_strategy": ("pathlib:Path", "", "", "its target 'pathlib:Path' is no subclass of Strategy"),
    "differs": (
        "averaging_classes:Differs",
        "many_devices=True",
        "",
        "its spec and Differs.capabilities differ: many_devices is True in the spec and False in "
        "the class; let both hold one object",
    ),
    "unready": (
        "averaging_classes:Differs",
        "",
        "init_args={'every': 3}",
        "Differs(every=3) failed with ConfigurationError: Differs(every=3): unknown; expected",
    ),
    "signature": (
        "averaging_classes:Signature",
        "",
        "",
        "Signature.optimizer_step(self, optimizer) cannot be called as Strategy.optimizer_step",
    ),
    "contradicts": (
        "averaging_classes:Contradicts",
        "engine_clips=True",
        "",
        "Contradicts.capabilities has engine_clips=True, but the class overrides none of",
    ),
    "steps_like_others": (
        "averaging_classes:StepsLikeOthers",
        "engine_steps=True",
        "",
        "StepsLikeOthers.capabilities has engine_steps=True, but the class overrides none of",
    ),
    "leaves_to_ddp": (
        "averaging_classes:LeavesToDDP",
        "launchers=None, one_process=False, many_devices=True, multi_node=True, engine_clips=True",
        "",
        "LeavesToDDP.capabilities has engine_clips=True, but the class overrides none of",
    ),
    "no_capabilities": (
        "averaging_classes:NoCapabilities",
        "",
        "",
        "NoCapabilities.capabilities is None; expected the Capabilities of its spec",
    ),
    "function": (
        "averaging_classes:make_nothing",
        "",
        "",
        "its target 'averaging_classes:make_nothing' made None, which is no Strategy",
    ),
    "value": (
        "averaging_classes:VALUE",
        "",
        "",
        "its target 'averaging_classes:VALUE' is 3; expected a class, or a function",
    ),
    "renamed": (
        "averaging_classes:Renamed",
        "",
        "",
        "Renamed.wrap(self, model) cannot be called as Strategy.wrap(self, module: 'nn.Module') -> "
        "'nn.Module' is (missing a required argument: 'model'): give it the same parameters",
    ),
    "unstarted": (
        "averaging_classes:Unstarted",
        "",
        "",
        "Unstarted.__init__ does not call super().__init__(**components): call it first",
    ),
    "swallows": (
        "averaging_classes:Swallows",
        "",
        "",
        "Swallows.__init__ takes **parts and does not pass it on, so that options such as "
        "launcher= are lost: call super().__init__(**parts) first",
    ),
    "private": (
        "averaging_private:Mine",
        "",
        "",
        "No module named 'stratagem.nowhere' (this stratagem-core has no such module: docs/",
    ),
    "precision": (
        "averaging_classes:Aliased",
        'precisions=("bf16",)',
        "",
        "it names the precision 'bf16', which a plan calls otherwise: write 'bf16-mixed'",
    ),
    "format": (
        "averaging_classes:Format",
        'checkpoint_io="one_file"',
        "",
        "it names a checkpoint io that cannot be found: unknown checkpoint io 'one_file'",
    ),
}
WRONG_CLASSES = """
    from dataclasses import replace
    from stratagem.discovery import Capabilities
    from stratagem.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

    VALUE = 3

    class Differs(SingleDeviceStrategy):
        capabilities = Capabilities()

    class Signature(Differs):
        def optimizer_step(self, optimizer): ...

    class Renamed(Differs):
        def wrap(self, model): return model

    class Unstarted(Differs):
        def __init__(self, **components): ...

    class Swallows(Differs):
        def __init__(self, **parts):
            super().__init__()

    class Aliased(Differs):
        capabilities = Capabilities(precisions=("bf16",))

    class Contradicts(Differs):
        capabilities = Capabilities(engine_clips=True)

    class StepsLikeOthers(Differs):
        capabilities = Capabilities(engine_steps=True)

    class LeavesToDDP(DDPStrategy):
        capabilities = replace(DDPStrategy.capabilities, engine_clips=True)

    class NoCapabilities(Strategy): ...

    class Format(Differs):
        capabilities = Capabilities(checkpoint_io="one_file")

    def make_nothing(): ...
"""


def test_each_class_is_compared_with_its_spec(program: Program) -> None:
    specs = "".join(
        f"        StrategySpec(name={name!r}, target={target!r}, api_version=1, {options}\n"
        f"                     capabilities=Capabilities({can})),\n"
        for name, (target, can, arguments, _) in MISTAKES.items()
        for options in [f"{arguments}," if arguments else ""]
    )
    code = (
        "from stratagem.discovery import *\n@hookimpl\ndef stratagem_components():\n"
        f"    return [\n{specs}"
        "        CheckpointIOSpec(name='no_format', target='pathlib:Path', api_version=1),\n"
        "        CheckpointIOSpec(name='abstract', target='stratagem.checkpoint:CheckpointIO',\n"
        "                         api_version=1),\n    ]\n"
    )
    program.install("averaging", code, requires=RANGE)
    write(program, "averaging_classes", WRONG_CLASSES)
    write(program, "averaging_sdk", "import vendor_sdk")
    write(program, "averaging_private", "import stratagem.nowhere")
    found = program.json("doctor", "averaging", code=1)
    for name, (*_, said) in MISTAKES.items():
        wrong = [p for p in found["problems"] if p.startswith(f"strategy {name!r}: ")]
        assert len(wrong) == 1, (name, wrong)
        assert said in wrong[0]
    assert (
        "checkpoint_io 'no_format': its target 'pathlib:Path' is no subclass of CheckpointIO"
    ) in found["problems"]
    assert (
        "checkpoint_io 'abstract': its target 'stratagem.checkpoint:CheckpointIO' does not define "
        "load_checkpoint, remove_checkpoint, save_checkpoint"
    ) in found["problems"]
    assert all(component["why_not"] for component in found["components"])


OTHER_KINDS = {
    "missing": (
        "LoggerSpec(name='missing', target='averaging_nowhere:Mine', api_version=1)",
        "logger 'missing': its target 'averaging_nowhere:Mine' cannot be imported",
    ),
    "no_logger": (
        "LoggerSpec(name='no_logger', target='pathlib:Path', api_version=1)",
        "logger 'no_logger': its target 'pathlib:Path' is no subclass of Logger",
    ),
    "signature": (
        "CheckpointIOSpec(name='signature', target='averaging_classes:IO', api_version=1)",
        "checkpoint_io 'signature': IO.load_checkpoint(self) cannot be called as CheckpointIO.",
    ),
    "arguments": (
        "CheckpointIOSpec(name='arguments', target='averaging_classes:Named', api_version=1,"
        " init_args={'level': 3})",
        "checkpoint_io 'arguments': Named(level=3) failed with TypeError: ",
    ),
    "nothing": (
        "CheckpointIOSpec(name='nothing', target='averaging_classes:make', api_version=1)",
        "checkpoint_io 'nothing': its target 'averaging_classes:make' made None, which is no Ch",
    ),
    "other_name": (
        "PrecisionSpec(name='other_name', target='averaging_classes:Half', api_version=1)",
        "precision 'other_name': its spec says name='other_name', and Half name='half': a plan is ",
    ),
    "own": (
        "AcceleratorSpec(name='own', target='averaging_classes:Own', api_version=1,"
        " probe='averaging_classes:probe', requires_dedicated_strategies=True)",
        "accelerator 'own': its spec says requires_dedicated_strategies=True, and Own "
        "requires_dedicated_strategies=False: ",
    ),
    "probe": (
        "AcceleratorSpec(name='probe', target='averaging_classes:Probed', api_version=1,"
        " probe='averaging_classes:two')",
        "accelerator 'probe': its probe 'averaging_classes:two' cannot be called with 0 argument",
    ),
    "incompatible_because": (
        "StrategySpec(name='incompatible_because', target='averaging_classes:Plain', api_version=1,"
        " incompatible_because='averaging_classes:nowhere')",
        "strategy 'incompatible_because': its incompatible_because 'averaging_classes:nowhere' "
        "cannot be imported: Attr",
    ),
    "environment": (
        "LauncherSpec(name='environment', target='averaging_classes:Starts', api_version=1,"
        " cluster_environment='nowhere')",
        "launcher 'environment': it names a cluster environment that cannot be found: unknown clus",
    ),
    "variables": (
        "ClusterEnvironmentSpec(name='variables', target='averaging_classes:Cluster',"
        " api_version=1, variables=('MINE',))",
        "cluster_environment 'variables': Cluster.global_rank(self, node) cannot be called as Clu",
    ),
    "engine": (
        "StrategySpec(name='engine', target='averaging_classes:Engine', api_version=1,"
        " capabilities=Capabilities(precisions=('32-true',), engine_precisions=('bf16-true',)))",
        "strategy 'engine': it names the engine's precision(s) bf16-true, and not in precisions",
    ),
    "compiles": (
        "StrategySpec(name='compiles', target='averaging_classes:Compiles', api_version=1,"
        " capabilities=Capabilities(compiles=('models',)))",
        "strategy 'compiles': it names 'models' in compiles; expected 'model' or nothing",
    ),
    "one_process": (
        "StrategySpec(name='one_process', target='averaging_classes:Many', api_version=1,"
        " capabilities=Capabilities(many_devices=True))",
        "strategy 'one_process': Many.capabilities has one_process=True and many_devices=True, but",
    ),
    "generator": (
        "StrategySpec(name='generator', target='averaging_classes:Generator', api_version=1)",
        "strategy 'generator': Generator.no_sync is a generator: decorate it with contextlib.cont",
    ),
    "coroutine": (
        "StrategySpec(name='coroutine', target='averaging_classes:Coroutine', api_version=1)",
        "strategy 'coroutine': Coroutine.wrap is a coroutine, which nobody awaits: define it by d",
    ),
}
OTHER_CLASSES = """
    from stratagem.accelerators import *
    from stratagem.checkpoint import *
    from stratagem.discovery import Availability, Capabilities
    from stratagem.environments import ClusterEnvironment
    from stratagem.launch import Launcher
    from stratagem.precision import Precision
    from stratagem.strategies import *
    import torch

    class IO(SingleFileCheckpointIO):
        def load_checkpoint(self): ...

    class Named(SingleFileCheckpointIO):
        def __init__(self, name): ...

    def make(): ...

    class Half(Precision):
        name, dtype = "half", torch.float16

    class Own(CPUAccelerator):
        name = "own"

    class Probed(CPUAccelerator):
        name = "probe"

    def probe(): return Availability(1, "one")
    def two(one, other): ...

    class Plain(SingleDeviceStrategy):
        capabilities = Capabilities()

    class Starts(Launcher):
        def launch(self, plan, function, *args, **kwargs): ...

    class Cluster(ClusterEnvironment):
        def global_rank(self, node): ...

    class Engine(SingleDeviceStrategy):
        capabilities = Capabilities(precisions=("32-true",), engine_precisions=("bf16-true",))

    class Compiles(SingleDeviceStrategy):
        capabilities = Capabilities(compiles=("models",))

    class Many(ParallelStrategy):
        capabilities = Capabilities(many_devices=True)

    class Generator(Plain):
        def no_sync(self, prepared):
            yield

    class Coroutine(Plain):
        async def wrap(self, module): return module
"""


def test_components_of_every_kind_are_imported_and_compared_with_their_specs(
    program: Program,
) -> None:
    specs = ", ".join(spec for spec, _ in OTHER_KINDS.values())
    code = (
        "from stratagem.discovery import *\n@hookimpl\ndef stratagem_components():\n"
        f"    return [{specs}]\n"
    )
    program.install("averaging", code, requires=RANGE)
    write(program, "averaging_classes", OTHER_CLASSES)
    problems = program.json("doctor", "averaging", code=1)["problems"]
    for _, said in OTHER_KINDS.values():
        assert [problem for problem in problems if problem.startswith(said)], (said, problems)
    assert len(problems) == len(OTHER_KINDS), problems


def test_an_objection_that_fails_stops_its_own_strategy_only(program: Program) -> None:
    code = GOOD.replace(
        "capabilities=CAN", "capabilities=CAN, incompatible_because=lambda plan: plan.none"
    )
    program.install("averaging", code, requires=RANGE)
    write(program, "averaging_classes", CLASSES)
    rows = {row["name"]: row for row in program.json("strategies", "--all")}
    assert rows["averaging"]["why_not"].startswith(
        "the incompatible_because of the strategy 'averaging' failed with MissingAttribute: "
    )
    assert rows["ddp"]["usable"]
    assert program.json("doctor", "averaging", code=1)["problems"] == [
        "nothing that it provides can be used on this machine"
    ]


def test_a_method_that_nearly_has_the_name_of_one_that_is_called_is_a_warning(
    program: Program,
) -> None:
    """Without `no_sync` all is as right as with it, and slower: the kit cannot tell."""
    program.install("averaging", GOOD, requires=RANGE)
    classes = textwrap.dedent(CLASSES) + "    def no_synch(self, prepared): ...\n"
    classes += "    def average(self): ...\n"
    write(program, "averaging_classes", classes)
    done = program("doctor", "averaging")
    assert row_of(done.stdout, "strategy 'averaging'")[1:] == [
        "warning",
        "Averaging.no_synch overrides nothing, and nothing calls it. Did you mean no_sync?",
    ]


def test_former_names_in_the_sources_are_problems_though_nothing_can_be_imported(
    program: Program,
) -> None:
    program.install("averaging", GOOD, requires=RANGE)
    classes = """
        import an_sdk_that_is_not_here
        from stratagem.discovery import Capabilities
        from stratagem.strategies import ParallelStrategy
        from stratagem_testing import StrategyConformance

        class Base(ParallelStrategy):
            def train(self):
                return self.ranks.gather_plain(1), self.checkpoint_io.takes_shards

            def make_ranks(self):
                ranks = super().make_ranks()
                ranks.data_part = (0, 2)
                return ranks

        class Averaging(Base):
            capabilities = Capabilities.parallel(replicated=False)

            def data_shard_of(self, rank, world_size):
                return (0, 1)

        class TestAveraging(StrategyConformance):
            parts = 1

        class Unrelated:
            def join_ranks(self): ...
    """
    write(program, "averaging_classes", classes)
    found = program.json("doctor", "averaging", code=1)
    said = [c["detail"] for c in found["checks"] if c["name"] == "former names"]
    assert [text.partition(";")[0].removeprefix("averaging_classes.py, ") for text in said] == [
        f"line {place} is a former name, which nothing reads or calls: use {now}"
        for place, now in (
            ("9: checkpoint_io.takes_shards", "supports_shards"),
            ("9: ranks.gather_plain", "gather_objects"),
            ("13: ranks.data_part", "run_split"),
            (
                "17: Capabilities(replicated=...)",
                'parameters ("same" for replicated=True, otherwise "drift" or "divided")',
            ),
            ("19: Averaging.data_shard_of", "data_split_of"),
            ("23: TestAveraging.parts", "data_groups"),
        )
    ]


def test_private_import_of_a_plugin_warns_with_the_public_name(program: Program) -> None:
    program.install("averaging", GOOD, requires=RANGE)
    private = (
        "from stratagem_torch.strategies.ddp import DDPStrategy\n"
        "import stratagem.plan.resolution\n"
        "from stratagem.launch import Launcher, process\n"
        "from stratagem import errors, discovery\n"
    )
    write(program, "averaging_classes", private + textwrap.dedent(CLASSES))
    may = "is not public, and may change in any release"
    found = program.json("doctor", "averaging")
    assert [c["detail"] for c in found["checks"] if c["name"] == "imports"] == [
        f"averaging_classes.py, line 1: stratagem_torch.strategies.ddp DDPStrategy {may}: import "
        "DDPStrategy from stratagem.strategies",
        f"averaging_classes.py, line 2: stratagem.plan.resolution {may}",
        f"averaging_classes.py, line 3: stratagem.launch process {may}",
    ]
    assert {c["status"] for c in found["checks"] if c["name"] == "imports"} == {"warning"}


# -- metadata, and what an import costs

REQUIREMENTS = {
    "": "it requires no release of stratagem-core in particular: expected a range such as ",
    **{
        f"{CORE}{clauses}": f"{CORE}{clauses} takes the next minor release, so that pip installs "
        "it beside a core whose plugin API it does not know: expected a range such as "
        for clauses in (">=0.1", "<9,>=0.1", "!=0.1.7")
    },
    f"{CORE}=={__version__}": f"{CORE}=={__version__} is one release, and pip refuses every other: "
    "expected a range such as ",
}


@pytest.mark.parametrize("requires", REQUIREMENTS)
def test_a_requirement_that_will_not_last_is_a_problem(program: Program, requires: str) -> None:
    program.install("averaging", NOTHING, requires=requires)
    (problem,) = program.json("doctor", "averaging", code=1)["problems"]
    assert problem == f"requirement on core: {REQUIREMENTS[requires]}stratagem-core>=0.1,<0.2"


def test_a_requirement_that_excludes_this_core_is_a_problem(program: Program) -> None:
    program.install("averaging", NOTHING, requires=f"{CORE}>=0.2,<0.3")
    problems = program.json("doctor", "averaging", code=1)["problems"]
    assert problems[0].startswith(
        f"requirement on core: {CORE}>=0.2,<0.3 excludes the installed release {__version__}: "
        f"expected a range such as {CORE}>=0.1,<0.2"
    )


def test_a_requirement_that_is_not_met_here_is_a_problem(program: Program) -> None:
    info = program.install("averaging", NOTHING, requires=RANGE)
    with info.joinpath("METADATA").open("a") as file:
        file.write(
            "Requires-Dist: vendors-sdk>=3\nRequires-Dist: torch>=99\n"
            'Requires-Dist: absent; extra == "test"\n'
        )
    problems = program.json("doctor", "averaging", code=1)["problems"]
    assert problems[0] == (
        "requirements: vendors-sdk>=3 is not installed: pip install 'vendors-sdk>=3'"
    )
    assert problems[1].startswith("requirements: torch>=99 is required, and torch 2.")
    assert problems[1].endswith(" is here: pip install 'torch>=99'")
    assert len(problems) == 2


def test_bad_version_of_a_plugin_is_a_problem(program: Program) -> None:
    info = program.install("averaging", NOTHING, requires=RANGE)
    info.joinpath("METADATA").write_text("Name: averaging\nVersion: first\n")
    said = program("doctor", "averaging", code=1).stdout
    assert "- version: 'first' in its metadata is no version as PEP 440 has them: 0.1.0" in said


def test_entry_point_in_an_unknown_group_is_a_problem(program: Program) -> None:
    info = program.install("averaging", NOTHING, requires=RANGE)
    info.joinpath("entry_points.txt").write_text("[stratagem.plugins]\nplug = averaging\n")
    said = program("doctor", "averaging", code=1).stdout
    assert (
        "- entry points: averaging declares the entry point 'plug' in the group "
        "'stratagem.plugins', which nobody reads: expected the group 'stratagem.backends'."
    ) in said
    assert (
        "- entry points: it declares none in the group 'stratagem.backends': nothing of it is "
        'found; in pyproject.toml that is [project.entry-points."stratagem.backends"]'
    ) in said


def test_entry_point_with_a_used_name_is_a_warning(program: Program) -> None:
    info = program.install("averaging", NOTHING, requires=RANGE)
    info.joinpath("entry_points.txt").write_text("[stratagem.backends]\none_device = averaging\n")
    said = program("doctor", "averaging").stdout
    assert row_of(said, "entry point one_device")[1:] == [
        "warning",
        "stratagem-core has one of the same name: STRATAGEM_DISABLE_PLUGINS would switch off both",
    ]


NOT_LOADED = {
    "disabled": (
        "- plugin plug: it is disabled: disabled by STRATAGEM_DISABLE_PLUGINS; what it provides is "
        "unknown until then"
    ),
    "broken": "- plugin plug: it is broken: OSError: libvendor.so",
    "incompatible": "- plugin plug: it is incompatible: requires stratagem-core<0.1, but",
}


@pytest.mark.parametrize("how", NOT_LOADED)
def test_one_that_is_not_loaded_cannot_work(program: Program, how: str) -> None:
    code = "raise OSError('libvendor.so')" if how == "broken" else NOTHING
    requires = f"{CORE}<0.1" if how == "incompatible" else RANGE
    program.install("averaging", code, requires=requires)
    if how == "disabled":
        program.variables["STRATAGEM_DISABLE_PLUGINS"] = "averaging"
    said = program("doctor", "averaging", code=1).stdout
    assert NOT_LOADED[how] in said
    verbose = program("doctor", "averaging", "--verbose", code=1).stdout
    assert ("Traceback" in verbose) == (how == "broken")
    assert ("\n`--verbose` shows the tracebacks." in said) == (how == "broken")


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_slow_import_of_a_plugin_is_named_with_its_time(program: Program, module: str) -> None:
    program.install("averaging", NOTHING, requires=RANGE)
    write(program, "averaging", f"    import {module}\n{NOTHING}")
    write(program, module, "import time; time.sleep(0.1)")
    (problem,) = program.json("doctor", "averaging", code=1)["problems"]
    assert re.match(rf"plugin plug: averaging .*imports {module}\b", problem)
    assert re.search(r"\d\.\d+ s\b", problem)
    assert problem.endswith(
        ", which every program that uses Stratagem pays: import it in the modules that the specs' "
        "targets name"
    )


def test_a_slow_import_is_a_warning(program: Program) -> None:
    program.install("averaging", NOTHING, requires=RANGE)
    write(program, "averaging", f"    import time; time.sleep(0.3)\n{NOTHING}")
    row = row_of(program("doctor", "averaging").stdout, "plugin plug")
    assert row[1] == "warning"
    assert row[2].endswith(" s to import, which every program that uses Stratagem pays")


def test_an_import_that_was_slow_once_is_no_warning(program: Program, tmp_path: Path) -> None:
    """The machine was busy, or read the files for the first time."""
    program.install("averaging", NOTHING, requires=RANGE)
    slow = f"""
        import pathlib, sys, time
        note = pathlib.Path({str(tmp_path / "note")!r})
        if sys.argv == ["-c", "averaging"] and not note.exists():
            note.touch()
            time.sleep(0.6)
    """
    write(program, "averaging", f"{textwrap.indent(textwrap.dedent(slow), '    ')}\n{NOTHING}")
    assert row_of(program("doctor", "averaging").stdout, "plugin plug")[1] == "ok"
    assert (tmp_path / "note").exists()


def test_a_module_that_only_loads_after_others_is_a_problem(program: Program) -> None:
    """Where another plugin has imported something first, an import may work by luck."""
    program.install("aa-first", f"    import sys; sys.lucky = True\n{NOTHING}", requires=RANGE)
    program.install("averaging", f"    import sys; assert sys.lucky\n{NOTHING}", requires=RANGE)
    (problem,) = program.json("doctor", "averaging", code=1)["problems"]
    assert problem.startswith("plugin plug: importing averaging alone fails: AttributeError")


def test_a_name_of_cores_or_of_anothers_is_a_problem(program: Program) -> None:
    spec = """
        from stratagem.discovery import AcceleratorSpec, Availability, hookimpl

        @hookimpl
        def stratagem_components():
            for name in NAMES:
                yield AcceleratorSpec(name=name, target="stratagem.accelerators:CPUAccelerator",
                                      api_version=1, probe=lambda: Availability(0, "no beads"))
    """
    program.install("averaging", spec.replace("NAMES", '("cpu", "abacus")'), requires=RANGE)
    program.install("counting", spec.replace("NAMES", '("abacus",)'), requires=RANGE)
    found = program.json("doctor", "averaging", code=1)
    assert found["problems"] == [
        "plugin plug: the accelerator name 'cpu' is reserved for stratagem-core: reach this one as "
        "averaging:cpu",
        "accelerator 'abacus': averaging, counting provide this name: users have to write "
        "'averaging:abacus'",
    ]
    whys = {component["name"]: component["why_not"] for component in found["components"]}
    assert whys == {"cpu": "no beads", "abacus": "no beads"}


def test_plugin_without_any_usable_component_is_a_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = ExaminedComponent("accelerator", "b", "beads:B", why_not="")
    missing = ExaminedComponent("accelerator", "a", "beads:A", why_not="no beads")
    both = Examination("counting", "1.5", (), (missing, there), ())
    assert both.problems() == []
    print_examination(both, verbose=False)
    assert capsys.readouterr().out.endswith(
        "\nNo problem found; on this machine a cannot be used.\n"
    )
    none = Examination("counting", "1.5", (), (missing,), ())
    assert none.problems() == ["nothing that it provides can be used on this machine"]


def test_doctor_shows_checks_of_the_examined_plugin_only(program: Program) -> None:
    code = f"""{NOTHING}
    from stratagem.discovery import Check

    @hookimpl
    def stratagem_doctor():
        return [Check("beads", "error", "they are loose")]
    """
    program.install("averaging", code, requires=RANGE)
    program.install("counting", NOTHING, requires=RANGE)
    assert program.json("doctor", "averaging", code=1)["problems"] == ["beads: they are loose"]
    assert program.json("doctor", "counting")["problems"] == []


# -- names


def test_a_name_that_nothing_has_is_refused(program: Program) -> None:
    program.install("averaging", GOOD, requires=RANGE)
    program.install("two-dist", NOTHING, requires=RANGE)
    said = program("doctor", "ddp", code=2).stderr
    assert said.startswith(
        "no distribution or plugin 'ddp' is installed: expected one of stratagem-core, "
        "stratagem-backend-torch, averaging, "
    )
    assert said.endswith("; 'ddp' is provided by stratagem-backend-torch\n")
    said = program("doctor", "averaing", code=2).stderr
    assert said.startswith(
        "no distribution or plugin 'averaing' is installed (did you mean 'averaging'?): expected "
    )
    # What most names begin with is no likeness.
    said = program("doctor", "stratagem-backend-zzz", code=2).stderr
    assert said.startswith("no distribution or plugin 'stratagem-backend-zzz' is installed: exp")
    said = program("doctor", "plug", code=2).stderr
    assert said == (
        "'plug' is the entry point of several distributions: name one of them, averaging or "
        "two-dist\n"
    )


# -- what is read of a class without an import

DOCUMENTED = '''"""Averages.

    capabilities: what it can do.
    capabilities = not code at all
    """

    '''
WRITTEN = {
    "one line": "capabilities = Capabilities(one_process=False)",
    "annotated": "capabilities: ClassVar[Capabilities] = Capabilities(one_process=False)",
    "several lines": "capabilities = Capabilities(\n        one_process=False,\n    )\n    x = 3",
    "with a comment": "capabilities = Capabilities(one_process=False)  # as it is",
}


@pytest.mark.parametrize("written", WRITTEN)
def test_capabilities_are_compared_as_a_class_writes_them(program: Program, written: str) -> None:
    spec = (
        "StrategySpec(name='averaging', target='averaging_classes:Mine', api_version=1,\n"
        "                         capabilities=Capabilities(multi_node=True))"
    )
    code = (
        "from stratagem.discovery import *\n@hookimpl\ndef stratagem_components():\n"
        f"    return [{spec}]\n"
    )
    program.install("averaging", code, requires=RANGE)
    head = (
        "from typing import ClassVar\n"
        "from stratagem.discovery import Capabilities\n"
        "from stratagem.strategies import Strategy\n\n\n"
        "class Mine(Strategy):\n    "
    )
    method = "\n\n    def backward(self, loss): ...\n"
    (program.folder / "averaging_classes.py").write_text(head + WRITTEN[written] + method)
    assert "differ (one_process=True and False; multi_node=True and False)" in str(
        program.json("doctor", code=1)["problems"]
    )
    # What no one can read without an import is left to `doctor averaging`.
    (program.folder / "averaging_classes.py").write_text(head + DOCUMENTED + "pass" + method)
    assert program.json("doctor")["problems"] == []
