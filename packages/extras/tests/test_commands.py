"""`stratagem doctor`, `strategies` and `explain` in full, run as a user runs them."""

import json
import platform
import re
import textwrap
from pathlib import Path

import pytest
from program import CORE, GOOD_PLUGIN, TORCH, Program, row_of

from stratagem import __version__
from stratagem.cli import run_command
from stratagem.discovery import Registry


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path)
    made.variables["COLUMNS"] = "400"  # one line for each row
    return made


# -- strategies


def test_strategies_shows_provider_and_usability(program: Program) -> None:
    said = program("strategies").stdout
    assert row_of(said, "single_device") == [
        "single_device",
        "yes",
        f"{CORE} {__version__}",
        "One process, one device",
    ]


def test_strategies_that_can_be_used_come_first_and_presets_are_left_out(
    program: Program,
) -> None:
    program.install("averaging", GOOD_PLUGIN)
    lines = program("strategies").stdout.splitlines()
    table = lines[1 : lines.index("")]
    assert [line.split()[1] for line in table] == ["yes"] * (len(table) - 1) + ["no"]
    names = [line.split()[0] for line in table]
    assert names[-2:] == ["average", "dp"]  # after all of core's that can be used
    assert "ddp_spawn" in names
    assert not any(name.endswith("_true") for name in names)
    assert lines[-3:] == [
        "and 12 such as ddp_find_unused_parameters_false: `stratagem strategies --all`",
        "",
        "Next: stratagem explain --strategy ddp",
    ]
    everything = program("strategies", "--all").stdout
    assert "ddp_spawn_find_unused_parameters_true" in everything
    assert "--all" not in everything


def test_the_next_command_that_strategies_names_works(program: Program) -> None:
    command = program("strategies").stdout.splitlines()[-1].removeprefix("Next: stratagem ")
    assert program(*command.split()).stdout.startswith("strategy ")


def test_a_reason_that_several_strategies_share_is_printed_once(program: Program) -> None:
    program.install(
        "abacus",
        """
        from stratagem.discovery import (
            AcceleratorSpec, Availability, Capabilities, StrategySpec, hookimpl
        )

        @hookimpl
        def stratagem_components():
            yield AcceleratorSpec(name="abacus", target="stratagem.strategies:Strategy",
                                  api_version=1, probe=lambda: Availability(0, "no beads"))
            for name in ("beads", "rods"):
                yield StrategySpec(name=name, target="stratagem.strategies:Strategy",
                                   api_version=1,
                                   capabilities=Capabilities(accelerators=("abacus",)))
        """,
    )
    said = program("strategies").stdout
    assert row_of(said, "beads, rods") == ["beads, rods", "abacus (no beads)"]
    assert said.count("no beads") == 1


def test_dp_is_of_no_use_on_a_machine_without_gpus(program: Program) -> None:
    (row,) = [row for row in program.json("strategies") if row["name"] == "dp"]
    assert not row["usable"]
    assert row["why_not"].startswith("strategy='dp' splits a batch over GPUs, received 2 devices")


def test_strategies_as_json(program: Program) -> None:
    listed = {row["name"]: row for row in program.json("strategies")}
    assert {"single_device", "ddp"} <= set(listed)
    assert listed["ddp"]["usable"] is True
    assert listed["ddp"]["distribution"] == TORCH
    assert listed["ddp"]["version"] == __version__
    assert listed["ddp"]["accelerators"] is None


def test_strategies_command_lists_an_installed_plugin(program: Program) -> None:
    program.install("averaging", GOOD_PLUGIN)
    assert row_of(program("strategies").stdout, "average") == [
        "average",
        "yes",
        "averaging 1.5",
        "Averages [often] what it can (also mean)",
    ]


def test_strategies_says_why_one_cannot_be_used_here(program: Program) -> None:
    program.install(
        "exotic",
        """
        from stratagem.discovery import Capabilities, StrategySpec, hookimpl

        @hookimpl
        def stratagem_components():
            return [StrategySpec(name="exotic", target="stratagem.strategies:Strategy",
                                 api_version=1,
                                 capabilities=Capabilities(accelerators=("abacus",)))]
        """,
    )
    said = program("strategies").stdout
    assert "\nexotic  " in said[: said.index("not usable here")]
    reason = said[said.index("not usable here") :]
    assert (
        "exotic           no accelerator is available for this request: cpu (not for this strategy)"
        in reason
    )
    assert {row["name"]: row["usable"] for row in program.json("strategies")}["exotic"] is False


def test_the_listing_asks_each_accelerator_once(program: Program) -> None:
    """A probe may take milliseconds, as that of a driver does, and there are 50 strategies."""
    program.install(
        "abacus",
        """
        from stratagem.discovery import (
            AcceleratorSpec, Availability, Capabilities, StrategySpec, hookimpl
        )

        def probe():
            with open("probed.txt", "a") as file:
                file.write("x")
            return Availability(0, "no beads")

        @hookimpl
        def stratagem_components():
            yield AcceleratorSpec(name="abacus", target="stratagem.strategies:Strategy",
                                  api_version=1, probe=probe, priority=100)
            yield StrategySpec(name="beads", target="stratagem.strategies:Strategy", api_version=1,
                               capabilities=Capabilities(accelerators=("abacus",)))
        """,
    )
    # Of its own accelerator, and not of all there are: the error of a request says it of each.
    (row,) = [row for row in program.json("strategies") if row["name"] == "beads"]
    assert row["why_not"] == "abacus (no beads)"
    assert program.folder.joinpath("probed.txt").read_text() == "x"


def test_a_strategy_is_judged_for_the_machine_not_for_the_job_around(program: Program) -> None:
    program.variables = {
        "TORCHELASTIC_RUN_ID": "1",
        "LOCAL_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert row_of(program("strategies").stdout, "single_device")[1] == "yes"


def test_an_ambiguous_name_is_listed_by_its_qualified_forms(program: Program) -> None:
    program.install("one-dist", GOOD_PLUGIN)
    program.install("two-dist", GOOD_PLUGIN)
    listed = {row["name"]: row["aliases"] for row in program.json("strategies")}
    assert listed["one-dist:average"] == ["one-dist:mean"]
    assert listed["two-dist:average"] == ["two-dist:mean"]
    assert "average" not in listed


def test_strategies_names_broken_plugins_and_points_to_doctor(program: Program) -> None:
    program.install("broken", "raise OSError('libvendor.so')")
    done = program("strategies")
    assert done.stderr == "could not be loaded: broken (`stratagem doctor` says why)\n"


# -- explain


def test_explain_prints_the_plan_and_its_reasons(program: Program) -> None:
    said = program("explain", "--strategy", "ddp", "--accelerator", "cpu", "--devices", "2").stdout
    provider = f"{TORCH} {__version__}"
    assert row_of(said, "strategy") == ["strategy", "ddp", provider, "your argument"]
    assert row_of(said, "devices") == ["devices", "0, 1", "your argument"]
    # For a script, though this program's standard input is none.
    assert row_of(said, "launcher")[1] == "script"


def test_explain_says_that_many_processes_share_the_cores(program: Program) -> None:
    many = ("explain", "--accelerator", "cpu", "--devices")
    line = program(*many, "9999").stdout.splitlines()[2]
    assert re.fullmatch(
        r"devices +0, 1, \.\.\., 9998 +your argument; so many processes share \d+ cores? and are "
        "slow",
        line,
    )
    rows = json.loads(program(*many, "9", "--json").stdout)
    assert rows[2]["choice"] == "0, 1, 2, 3, 4, 5, 6, 7, 8"
    assert program(*many, "2").stdout.splitlines()[2].endswith("your argument")


def test_explain_why_lists_rejected_choices(program: Program) -> None:
    assert "not taken" not in program("explain").stdout
    lines = program("explain", "--why").stdout.splitlines()
    (slurm,) = [line for line in lines if line.startswith("  not taken") and "SLURM" in line]
    assert slurm.endswith("SLURM_JOB_ID is not set")


def test_explain_takes_every_part_of_a_request(program: Program) -> None:
    plan = program.json(
        "explain",
        *("--strategy", "ddp", "--devices", "2", "--num-nodes", "1", "--precision", "bf16"),
        *("--checkpoint-io", "single_file", "--cluster-environment", "plain"),
    )
    chosen = {row["what"]: (row["choice"], row["why"]) for row in plan}
    assert chosen["precision"] == ("bf16-mixed", "your argument")
    assert chosen["checkpoint_io"] == ("single_file", "your argument")
    assert chosen["cluster_environment"] == ("plain", "your argument")
    assert chosen["world_size"][0] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "ddpp"], "unknown strategy 'ddpp'. Did you mean 'ddp'?"),
        (
            ["--strategy", "single_device", "--devices", "2"],
            "the strategy 'single_device' uses one device, received devices=2 (2 devices): pass "
            "devices=1, or a strategy for several devices such as 'ddp'",
        ),
        (["--devices", "none"], "devices='none': expected a number of devices, -1 for all"),
        (["--num-nodes", "2", "--strategy", "ddp"], "num_nodes=2 needs a cluster"),
    ],
)
def test_explain_refuses_impossible_arguments(
    program: Program, arguments: list[str], message: str
) -> None:
    done = program("explain", *arguments, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(message)


def test_explain_reads_numbers_as_a_trainer_is_given_them(program: Program) -> None:
    done = program("explain", "--accelerator=cpu", "--devices=-2", code=2)
    assert done.stderr.startswith("devices=-2: expected a number of devices, -1 for all")
    assert program("explain", "--devices=0", code=2).stderr.startswith("devices=0 leaves nothing")


def test_explain_refuses_arguments_that_a_strategy_refuses(program: Program) -> None:
    done = program("explain", "--strategy=dp", "--accelerator=cpu", "--devices=2", code=2)
    assert done.stderr == (
        "strategy='dp' splits a batch over GPUs, received 2 devices of the accelerator 'cpu': use "
        "strategy='ddp', or devices=1\n"
    )


def test_explain_starts_no_process(program: Program) -> None:
    code = """
import os, sys
from stratagem.cli import main

def refuse(event, arguments):
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}:
        print(event)
        os._exit(9)

sys.addaudithook(refuse)
sys.argv = ["stratagem", "explain", "--strategy", "ddp", "--devices", "2"]
main()
"""
    done = program.python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


# -- doctor


def test_doctor_reports_no_problem_on_a_good_installation(program: Program) -> None:
    program.install("averaging", GOOD_PLUGIN)
    said = program("doctor").stdout
    assert said.endswith("\nNo problem found.\n\nNext: stratagem strategies\n")
    for name in ("python", "torch", "averaging", "cores", "memory", "GPUs"):
        assert row_of(said, name)[1:]
    assert row_of(said, "accelerator") == ["accelerator", "cpu"]
    assert row_of(said, "SLURM") == ["SLURM", "SLURM_JOB_ID is not set"]


def test_doctor_as_json(program: Program) -> None:
    found = program.json("doctor")
    assert found["ok"] is True
    assert found["versions"][CORE] == __version__
    (core,) = [report for report in found["plugins"] if report["distribution"] == CORE]
    assert found["system"]["platform"] == platform.platform()
    assert (core["status"], core["slow"]) == ("loaded", False)
    kinds = {component["kind"] for component in found["components"]}
    of_core = {"accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher"}
    assert kinds == {*of_core, "logger", "callback", "profiler", "name"}


def test_a_disabled_plugin_is_reported_and_no_problem(program: Program) -> None:
    program.install("averaging", GOOD_PLUGIN)
    program.variables["STRATAGEM_DISABLE_PLUGINS"] = "averaging"
    row = row_of(program("doctor").stdout, "averaging 1.5")
    assert row[1] == "disabled (environment)"
    assert row[-1] == "disabled by STRATAGEM_DISABLE_PLUGINS"


def test_a_broken_plugin_is_a_problem_and_its_traceback_is_shown_on_request(
    program: Program,
) -> None:
    program.install("broken", "raise OSError('libvendor.so is missing')")
    said = program("doctor", code=1).stdout
    assert row_of(said, "broken 1.5")[1] == "broken (import)"
    assert said.endswith("\nNext: stratagem doctor --verbose  # with tracebacks\n")
    assert "\n- broken (plug) is broken: OSError: libvendor.so is missing\n" in said
    assert "Traceback" not in said
    verbose = program("doctor", "--verbose", code=1).stdout
    assert verbose.count("Traceback (most recent call last)") == 1


def test_an_incompatible_plugin_is_a_problem(program: Program) -> None:
    program.install("ancient", GOOD_PLUGIN, requires=f"{CORE}<0.1")
    found = program.json("doctor", code=1)
    (report,) = [r for r in found["plugins"] if r["distribution"] == "ancient"]
    assert (report["status"], report["stage"]) == ("incompatible", "metadata")


def test_an_ambiguous_name_is_a_problem_and_both_forms_are_shown(program: Program) -> None:
    program.install("one-dist", GOOD_PLUGIN)
    program.install("two-dist", GOOD_PLUGIN)
    said = program("doctor", code=1).stdout
    assert (
        "- the strategy name 'average' is ambiguous: choose one of one-dist:average, "
        "two-dist:average\n" in said
    )


def test_a_slow_import_is_flagged_but_no_problem(program: Program) -> None:
    program.install("slow", "import time\ntime.sleep(0.25)\n" + textwrap.dedent(GOOD_PLUGIN))
    assert row_of(program("doctor").stdout, "slow 1.5")[3].endswith(" s (slow)")


def test_plugins_examine_themselves(program: Program) -> None:
    program.install(
        "examined",
        """
        from stratagem.discovery import Check, hookimpl

        @hookimpl
        def stratagem_doctor():
            return [Check("compiler", "ok", "12.2"), Check("driver", "warning", "is old")]
        """,
    )
    said = program("doctor").stdout
    assert "examined: compiler  ok       12.2\n" in said
    assert "examined: driver    warning  is old\n" in said


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise RuntimeError('no SDK')", "stratagem_doctor: raised RuntimeError: no SDK"),
        ("return [Check('driver', 'error', 'is missing')]", "driver: is missing"),
        (
            "return ['fine']",
            "stratagem_doctor: raised TypeError: stratagem_doctor() returned 'fine'; expected "
            "stratagem.discovery.Check",
        ),
    ],
)
def test_a_failed_check_is_a_problem(program: Program, body: str, problem: str) -> None:
    program.install(
        "examined",
        f"""
        from stratagem.discovery import Check, hookimpl

        @hookimpl
        def stratagem_doctor():
            {body}
        """,
    )
    found = program.json("doctor", code=1)
    assert found["problems"] == [f"examined:plug: {problem}"]


def test_accelerator_with_failing_probe_is_not_available(
    program: Program,
) -> None:
    program.install(
        "abacus",
        """
        from stratagem.discovery import AcceleratorSpec, hookimpl

        def probe():
            raise OSError("libabacus.so")

        @hookimpl
        def stratagem_components():
            return [AcceleratorSpec(name="abacus", target="stratagem.strategies:Strategy",
                                    api_version=1,
                                    probe=probe, priority=100)]
        """,
    )
    (row,) = [c for c in program.json("doctor")["components"] if c["name"] == "abacus"]
    assert row["here"] == "not available: its probe failed with OSError: libabacus.so"
    assert row_of(program("explain").stdout, "accelerator")[1] == "cpu"


def test_the_cluster_that_is_detected_is_marked(program: Program) -> None:
    program.variables["TORCHELASTIC_RUN_ID"] = "7"
    rows = {c["name"]: c["here"] for c in program.json("doctor")["components"]}
    assert rows["TorchElastic"] == "detected: TORCHELASTIC_RUN_ID is set"
    assert rows["plain"] == ""


def test_doctor_warns_of_other_users_of_the_machine(program: Program) -> None:
    assert "other users of this machine can connect to it (SECURITY.md)" in program("doctor").stdout


# -- what plugins say of others, for doctor


def test_a_plugin_checks_the_specs_of_others(program: Program) -> None:
    program.plugins = [CORE, "stratagem-extras"]
    program.install("averaging", GOOD_PLUGIN)
    program.install(
        "strict",
        """
        from stratagem.discovery import hookimpl

        @hookimpl
        def stratagem_check_spec(spec):
            yield f"{spec.name} is too short a name"
        """,
    )
    assert (
        "averaging: strategy 'average': average is too short a name"
        in program.json("doctor", code=1)["problems"]
    )


def test_a_plugin_that_cannot_check_specs_is_one_failed_check(program: Program) -> None:
    program.install("averaging", GOOD_PLUGIN)
    program.install("meaning", GOOD_PLUGIN.replace("average", "other").replace("mean", "others"))
    program.install(
        "strict",
        """
        from stratagem.discovery import hookimpl

        @hookimpl
        def stratagem_check_spec(spec):
            raise RuntimeError("no rules")
        """,
    )
    assert program.json("doctor", code=1)["problems"] == [
        "strict:plug: stratagem_check_spec: raised RuntimeError: no rules"
    ]


def test_stratagem_examine_hook_answers_doctor_for_a_distribution(program: Program) -> None:
    program.install(
        "second",
        """
        from stratagem.discovery import hookimpl

        @hookimpl(tryfirst=True)
        def stratagem_examine(distribution, verbose):
            print(distribution, verbose)
            return 1 if distribution == "mine" else None
        """,
        requires=f"{CORE}<0.2,>=0.1",
    )
    assert program("doctor", "mine", "--verbose", code=1).stdout == "mine True\n"
    assert program("doctor", "second").stdout.startswith("second False\nsecond 1.5\n")


def test_doctor_without_examine_hook_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stratagem_extras.commands.doctor.get_registry", Registry)
    assert run_command(["doctor", "mine"]) == 2
    assert capsys.readouterr().err == (
        "stratagem doctor mine: no plugin that is installed examines a single distribution: "
        "pip install stratagem-testing\n"
    )
