"""The program's commands that look and list, run as a user runs them, with real plugins beside."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from program import CORE, GOOD_PLUGIN, Program, row_of

from stratagem import __version__
from stratagem.cli import COMMANDS, run_command
from stratagem.cli.console import aligned, print_table, table_width
from stratagem.cli.program import plugin_commands
from stratagem.discovery import hints
from stratagem.discovery.hints import gpus
from stratagem.discovery.registry import get_registry


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path)
    made.variables["COLUMNS"] = "400"  # one line for each row
    return made


# -- the program


def test_the_installed_script_tells_the_version() -> None:
    script = Path(sys.executable).with_name("stratagem")
    said = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"stratagem {__version__}\n"


EVERY_COMMAND = (
    *("run", "strategies", "explain", "doctor", "new-backend", "fit", "validate", "test"),
    *("predict", "report", "checkpoint inspect", "checkpoint verify", "checkpoint consolidate"),
    *("checkpoint convert", "checkpoint average", "checkpoint durability"),
)


def test_help_lists_every_command(program: Program) -> None:
    said = program("--help").stdout
    assert all(f"\n  {name} " in said for name in EVERY_COMMAND)
    assert program("-h").stdout == said


def test_without_a_command_the_list_is_an_error(program: Program) -> None:
    done = program(code=2)
    assert (done.stdout, done.stderr) == ("", program("--help").stdout)


def test_a_group_of_commands_is_listed(program: Program) -> None:
    said = program("checkpoint", "--help").stdout
    listed = [line for line in said.splitlines() if line.startswith("  ")]
    names = [name for name in EVERY_COMMAND if name.startswith("checkpoint ")]
    assert [line.split("  ")[1] for line in listed] == names
    done = program("checkpoint", code=2)
    assert (done.stdout, done.stderr) == ("", said)


OF_ARGPARSE = [name for name in EVERY_COMMAND if name not in ("fit", "validate", "test", "predict")]


@pytest.mark.parametrize("name", OF_ARGPARSE)
def test_a_commands_line_in_the_list_agrees_with_its_own_help(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    summaries = {each: summary for each, (_, summary) in COMMANDS.items()}
    found, _ = plugin_commands(get_registry())
    summaries |= {command.name: command.summary for _, command in found.values()}
    with pytest.raises(SystemExit) as end:
        run_command([*name.split(), "--help"])
    assert end.value.code == 0
    assert f" {summaries[name]} " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "No such command 'nosuch'. `stratagem --help` lists all commands."),
        (["strategy", "--all"], "No such command 'strategy'. Did you mean 'strategies'? "),
        (["new-bakcend"], "No such command 'new-bakcend'. Did you mean 'new-backend'? "),
        (["--jsn"], "No such command '--jsn'. "),
        (
            ["checkpoint", "show", "a.ckpt"],
            "No such command 'checkpoint show'. Did you mean 'checkpoint inspect'? ",
        ),
        (
            ["checkpoint", "verfy", "a.ckpt"],
            "No such command 'checkpoint verfy'. Did you mean 'checkpoint verify'? `stratagem "
            "checkpoint --help` lists all commands.",
        ),
    ],
)
def test_an_unknown_command_is_refused(
    program: Program, arguments: list[str], message: str
) -> None:
    done = program(*arguments, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"stratagem: error: {message}")


def test_unknown_command_lists_broken_plugins(program: Program) -> None:
    program.install("broken", "raise OSError('libvendor.so')")
    assert (
        "broken 1.5 is broken, and nothing that it provides is known: OSError: libvendor.so. "
        in program("tune", code=2).stderr
    )


def test_the_package_runs_as_the_program(program: Program) -> None:
    said = program.python("-m", "stratagem", "--version")
    assert (said.returncode, said.stdout) == (0, f"stratagem {__version__}\n")


@pytest.mark.parametrize("command", ["strategies", "explain", "doctor", "new-backend"])
def test_command_help_describes_its_output(program: Program, command: str) -> None:
    said = program(command, "--help").stdout
    assert said.startswith(f"usage: stratagem {command}")
    assert "--json" in said


@pytest.mark.parametrize("command", ["strategies", "explain", "doctor"])
def test_an_unknown_option_is_refused(program: Program, command: str) -> None:
    done = program(command, "--jsn", code=2)
    assert f"stratagem {command}: error: unrecognized arguments: --jsn" in done.stderr


def test_a_reader_that_has_enough_is_no_error(program: Program) -> None:
    """As `stratagem strategies | head -1` has."""
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable) as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "stratagem", "strategies"],
            env=program.environment(),
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_reader_that_has_enough_in_the_middle_is_no_error(program: Program) -> None:
    readable, writable = os.pipe()
    # Less than doctor writes, so that it waits for the reader.
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-u", "-m", "stratagem", "doctor", "--json"]
    with subprocess.Popen(
        command, env=program.environment(), stdout=writable, stderr=subprocess.PIPE, text=True
    ) as doctor:
        os.close(writable)
        assert os.read(readable, 1) == b"{"
        os.close(readable)
        assert doctor.stderr is not None
        assert doctor.stderr.read() == ""
    assert doctor.returncode == 1


def test_importing_the_program_loads_nothing_heavy(program: Program) -> None:
    heavy = {"torch", "rich", "click", "jsonargparse", "pluggy", "argparse"}
    code = f"import sys, stratagem.cli; print({heavy} & set(sys.modules))"
    assert program.python("-c", code).stdout == "set()\n"


@pytest.mark.parametrize("command", ["strategies", "explain", "doctor"])
def test_no_command_imports_torch(program: Program, command: str) -> None:
    code = f"""
import sys
from stratagem.cli import main
sys.argv = ["stratagem", "{command}"]
try:
    main()
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    done = program.python("-c", code)
    assert done.returncode == 0, done.stderr


# -- tables


def test_rows_are_aligned_and_lines_in_cells_joined() -> None:
    rows = [("name", "what"), ("a", "first\n  second"), ("longer", "")]
    assert aligned(rows) == "name    what\na       first second\nlonger"


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("0", 100), ("wide", 100), ("", 100)])
def test_columns_that_are_no_width_count_as_unset(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda: os.terminal_size((0, 0)))
    assert table_width() == width


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, **variables: str) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": str(width), **variables}.items():
        monkeypatch.setenv(name, value)


def test_a_table_on_a_narrow_terminal_is_folded_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 30, NO_COLOR="1")
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    print_table(("name", "what"), [("[bold]", text)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "name    what"
    assert lines[1].startswith("[bold]  ")
    assert all(len(line) <= 30 for line in lines)
    assert "".join(line[8:] for line in lines[1:]) == text


def test_words_and_commands_stay_whole_where_a_line_has_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 24, NO_COLOR="1")
    print_table(("a", "b"), [("x", "apt-get install libaio-dev please")])
    assert capsys.readouterr().out == "a  b\nx  apt-get install\n   libaio-dev please\n"


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_statuses_have_colors_on_a_terminal_unless_disabled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str]
) -> None:
    on_a_terminal(monkeypatch, 80, **variables)
    print_table(("name", "usable here", "note"), [("a", "yes", "no doubt"), ("b", "no", "")])
    said = capsys.readouterr().out
    assert ("\x1b[32myes" in said) is (variables == {})
    assert ("\x1b[" in said) is (variables == {})


@pytest.mark.parametrize("command", ["strategies", "doctor"])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_output_fits_the_width_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, width: int
) -> None:
    on_a_terminal(monkeypatch, width, NO_COLOR="1")
    run_command([command])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if len(line) > width] == []
    assert lines[-1].startswith("Next: stratagem ")


@pytest.mark.parametrize("command", ["strategies", "doctor"])
@pytest.mark.parametrize(("columns", "width"), [("", 100), ("80", 80), ("400", 400)])
def test_table_in_a_pipe_has_100_columns_or_env_columns(
    program: Program, command: str, columns: str, width: int
) -> None:
    program.variables = {"COLUMNS": columns}
    said = program(command).stdout
    assert "\x1b" not in said
    widest = max(map(len, said.splitlines()))
    assert min(width, 120) - 10 < widest <= width


def test_table_wraps_between_words() -> None:
    rows = [("strategy", "parameters", "why"), ("fsdp", "0.14 GiB", "a b c d e f g h i j")]
    assert aligned(rows, 30) == (
        "strategy  parameters  why\n"
        "fsdp      0.14 GiB    a b c d\n"
        "                      e f g h\n"
        "                      i j"
    )


def test_table_does_not_break_a_url() -> None:
    address = "https://pytorch.org/get-started/locally"
    lines = aligned([("cuda and its other names", f"see {address} for it")], 64).splitlines()
    assert any(address in line for line in lines)


def test_help_folds_paragraphs_and_keeps_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("", "run", "doctor"):
        with contextlib.suppress(SystemExit):
            run_command([*command.split(), "--help"])
        lines = capsys.readouterr().out.splitlines()
        long = [line for line in lines if len(line) > 60]
        assert all(line.startswith(("    stratagem run ", "usage:")) for line in long), command
    assert "That is: versions, plugins, components, the machine, and" in lines  # to its end


def test_a_size_of_memory_stays_whole() -> None:
    assert aligned([("of memory", "0.14 GiB of it")], 19) == "of        0.14 GiB\nmemory    of it"


# -- what a machine has


def test_beside_a_broken_plugin_core_imports_its_own_modules(program: Program) -> None:
    """What it would provide is unknown, so that any name which is not found might be its."""
    program.install("broken", "raise OSError('libvendor.so is missing')")
    done = program.python("-c", "from stratagem.checkpoint import catalog; print(catalog.__name__)")
    assert (done.stdout, done.returncode) == ("stratagem.checkpoint.catalog\n", 0), done.stderr


def test_the_gpus_of_each_vendor_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "PCI", str(tmp_path / "pci"))
    monkeypatch.setattr(hints, "NVIDIA", str(tmp_path / "nvidia"))
    assert gpus() == {}
    for place, kind, vendor, driver in (
        ("0000:00:02.0", "0x030000", "0x8086", "i915"),
        ("0000:00:0b.0", "0x120000", "0x8086", "intel_vpu"),  # no GPU
        ("0000:01:00.0", "0x030200", "0x10de", "nvidia"),
        ("0000:02:00.0", "0x030000", "0x10de", ""),
        ("0000:03:00.0", "0x120000", "0x1002", "amdgpu"),
        ("0000:04:00.0", "0x038000", "0x8086", "xe"),
        ("0000:05:00.0", "0x020000", "0x8086", "ice"),
    ):
        device = tmp_path / "pci" / place
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        (device / "vendor").write_text(f"{vendor}\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    (tmp_path / "nvidia/0000:01:00.0").mkdir(parents=True)
    described = "Model: \t\t NVIDIA H200\nIRQ: 5\n"
    (tmp_path / "nvidia/0000:01:00.0/information").write_text(described)
    assert gpus() == {
        "0000:00:02.0: Intel, driver i915": "",  # of a processor, perhaps
        "0000:01:00.0: NVIDIA H200, driver nvidia": "cuda",
        "0000:02:00.0: NVIDIA, no driver": "cuda",
        "0000:03:00.0: AMD, driver amdgpu": "cuda",
        "0000:04:00.0: Intel, driver xe": "xpu",
    }


@pytest.mark.parametrize(("machine", "count"), [("arm64", 1), ("x86_64", 0)])
def test_apples_gpu_is_found(machine: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert gpus() == dict([("the GPU of Apple silicon", "mps")] * count)


# -- plugins' commands

GREETING_PLUGIN = """
    from stratagem.discovery import Command, hookimpl

    @hookimpl
    def stratagem_cli():
        yield Command("greet", "Say hello.", "greeting_commands:greet")
        yield Command("checkpoint greet", "Say hello to a checkpoint.", "greeting_commands:twice")
"""
GREETING_COMMANDS = """
print("imported")

def greet(arguments):
    print("hello", *arguments)
    return 3

def twice(arguments):
    print("hello", "hello", *arguments)
    return 0
"""


def offering(*commands: tuple[str, str], before: str = "") -> str:
    """Return a plugin module with commands, each a name and a target."""
    offers = "".join(f"        yield Command({n!r}, 'Does it.', {t!r})\n" for n, t in commands)
    return (
        "from stratagem.discovery import Command, hookimpl\n\n"
        f"@hookimpl\ndef stratagem_cli():\n        {before or 'pass'}\n{offers}"
    )


@pytest.fixture
def greeting(program: Program) -> Program:
    program.install("greeting", GREETING_PLUGIN)
    program.folder.joinpath("greeting_commands.py").write_text(GREETING_COMMANDS)
    return program


def test_a_plugin_adds_a_command_and_gives_its_exit_code(greeting: Program) -> None:
    done = greeting("greet", "you", "--loud", code=3)
    assert (done.stdout, done.stderr) == ("imported\nhello you --loud\n", "")


def test_plugin_adds_a_subcommand_to_a_group_of_core(greeting: Program) -> None:
    assert greeting("checkpoint", "greet", "you").stdout == "imported\nhello hello you\n"


def test_commands_of_plugins_are_listed_and_not_imported(greeting: Program) -> None:
    said = greeting("--help").stdout
    assert row_of(said.replace("\n  ", "\n"), "greet") == ["greet", "Say hello."]
    assert "  checkpoint greet " in greeting("checkpoint", "--help").stdout
    assert "imported" not in said


def test_a_command_of_core_asks_no_plugin_for_its_commands(program: Program) -> None:
    program.install("clumsy", offering(before="raise RuntimeError('dropped it')"))
    for arguments in (["strategies"], ["run", "--help"]):
        assert "dropped it" not in program(*arguments).stderr


REFUSED = {
    "raises": (
        offering(before="raise RuntimeError('dropped it')"),
        "stratagem_cli: raised RuntimeError: dropped it",
    ),
    "no_command": (
        offering(before="yield 'greet'"),
        "stratagem_cli: raised TypeError: stratagem_cli() returned 'greet'; expected "
        "stratagem.discovery.Command",
    ),
    "nothing": (
        "from stratagem.discovery import hookimpl\n@hookimpl\ndef stratagem_cli(): pass\n",
        "stratagem_cli: raised TypeError: 'NoneType' object is not iterable",
    ),
    "name": (
        offering(("Greet", "greeting_commands:greet")),
        "stratagem_cli: raised PluginError: a command has the name 'Greet'; expected one or two "
        "words of lower-case letters, digits, '-' and '_', each beginning with a letter",
    ),
    "target": (
        offering(("tune", "greeting_commands.greet")),
        "stratagem_cli: raised PluginError: the command 'tune' has "
        "target='greeting_commands.greet'; expected 'package.module:function'",
    ),
    "of_core": (
        offering(("strategies", "greeting_commands:greet")),
        "command 'strategies': stratagem-core has the command 'strategies', which wins: give "
        "this one another name",
    ),
    "below_core": (
        offering(("run fast", "greeting_commands:greet")),
        "command 'run fast': stratagem-core has the command 'run', which wins: give this one "
        "another name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plugin_that_fails_to_add_a_command_is_skipped(greeting: Program, case: str) -> None:
    code, problem = REFUSED[case]
    greeting.install("clumsy", code)
    done = greeting("greet", "you", code=3)
    assert done.stdout == "imported\nhello you\n"
    assert done.stderr == (
        f"stratagem: clumsy:plug: {problem}. To go without this plugin, set "
        "STRATAGEM_DISABLE_PLUGINS=clumsy\n"
    )
    assert greeting.json("doctor", code=1)["problems"] == [f"clumsy:plug: {problem}"]
    assert "single_device" in greeting("strategies").stdout
    assert greeting("explain", "--help").stdout.startswith("usage: stratagem explain")


def test_a_command_that_two_plugins_have_is_refused_and_both_are_named(greeting: Program) -> None:
    greeting.install("saluting", offering(("greet", "greeting_commands:twice")))
    done = greeting("greet", "you", code=2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert sorted(lines) == [
        f"stratagem: {one}:plug: command 'greet': {other}:plug has the command 'greet', so that "
        "neither can be called: give one of them another name. To go without this plugin, set "
        f"STRATAGEM_DISABLE_PLUGINS={one}"
        for one, other in (("greeting", "saluting"), ("saluting", "greeting"))
    ]
    assert len(greeting.json("doctor", code=1)["problems"]) == 2
    assert greeting("checkpoint", "greet").stdout == "imported\nhello hello\n"
    greeting.variables["STRATAGEM_DISABLE_PLUGINS"] = "saluting"
    assert greeting("greet", "you", code=3).stderr == ""


TARGETS = {
    "greeting_commands:wave": (
        "AttributeError: module 'greeting_commands' has no attribute 'wave'",
        "its target's module greeting_commands defines no 'wave'",
    ),
    "waving_commands:wave": (
        "ModuleNotFoundError: No module named 'waving_commands'",
        "its target 'waving_commands:wave' cannot be found: there is no module waving_commands",
    ),
}


def test_a_plugin_that_imports_a_former_module_is_led_to_the_page(greeting: Program) -> None:
    greeting.install("waving", offering(("wave", "old_commands:wave")))
    greeting.folder.joinpath("old_commands.py").write_text(
        "from stratagem.distributed import ParallelStrategy\n"
    )
    said = greeting("wave", code=1).stderr
    assert "No module named 'stratagem.distributed'. It was made for another release of" in said
    assert "docs/extend/plugin-api.md lists the modules that have moved" in said


@pytest.mark.parametrize("target", TARGETS)
def test_command_with_missing_target_fails_in_one_line(greeting: Program, target: str) -> None:
    error, problem = TARGETS[target]
    greeting.install("waving", offering(("wave", target)))
    done = greeting("wave", code=1)
    assert done.stderr == (
        f"stratagem wave: error: cannot import the command 'wave' of waving:plug: "
        f"target={target!r} failed with {error}. Its distribution or the SDK that it needs is "
        "broken or missing; `stratagem doctor` says more\n"
    )
    assert greeting.json("doctor", code=1)["problems"] == [
        f"waving:plug: command 'wave': {problem}"
    ]
    assert greeting("greet", code=3).stderr == ""


# -- the short forms of core


def test_short_doctor_lists_plugins_and_problems(program: Program) -> None:
    program.plugins = [CORE]
    said = program("doctor").stdout
    assert row_of(said, CORE) == [CORE, __version__, "loaded"]
    assert row_of(said, "checkpoint_io")[1] == "async, directory, single_file"
    assert said.endswith(
        f"\nNo problem found.\n\nIn full: pip install stratagem-extras=={__version__}\n"
    )
    program.install("broken", "raise OSError('libvendor.so is missing')")
    said = program("doctor", code=1).stdout
    assert row_of(said, "broken") == ["broken", "1.5", "broken"]
    assert "\nProblems: 1\n- broken (plug) is broken: OSError: libvendor.so is missing\n" in said


def test_short_doctor_lists_broken_plugins_and_ambiguous_names(program: Program) -> None:
    program.plugins = [CORE]
    program.install("one-dist", GOOD_PLUGIN)
    program.install("two-dist", GOOD_PLUGIN)
    program.install("clumsy", offering(before="raise RuntimeError('dropped it')"))
    program.install(
        "examined",
        """
        from stratagem.discovery import Check, hookimpl

        @hookimpl
        def stratagem_doctor():
            return [Check("driver", "error", "is missing")]
        """,
    )
    lines = program("doctor", code=1).stdout.splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- the strategy name 'average' is ambiguous: choose one of one-dist:average, "
        "two-dist:average",
        "- the strategy name 'mean' is ambiguous: choose one of one-dist:mean, two-dist:mean",
        "- clumsy:plug: stratagem_cli: raised RuntimeError: dropped it",
        "- examined:plug: driver: is missing",
    ]


def test_strategies_in_short_says_which_are_usable(program: Program) -> None:
    program.plugins = [CORE]
    program.install("averaging", GOOD_PLUGIN)
    program.install("broken", "raise OSError('libvendor.so')")
    done = program("strategies")
    assert row_of(done.stdout, "single_device")[1:] == ["yes", "One process, one device"]
    assert row_of(done.stdout, "average") == ["average", "yes", "Averages [often] what it can"]
    assert "_true" not in done.stdout
    table, _, reasons = done.stdout.partition("\nnot usable here  ")
    assert row_of(table, "dp")[1] == "no"
    assert "dp               strategy='dp' splits a batch over GPUs, received 2 devices" in reasons
    assert done.stderr == "could not be loaded: broken (`stratagem doctor` says why)\n"


@pytest.mark.parametrize("command", ["doctor", "strategies"])
@pytest.mark.parametrize("argument", ["--json", "averaging"])
def test_short_commands_refuse_options_of_the_full_form(
    program: Program, command: str, argument: str
) -> None:
    program.plugins = [CORE]
    (line,) = program(command, argument, code=2).stderr.splitlines()[-1:]
    assert line.startswith(
        f"stratagem {command}: error: {argument} is an option of the full form. stratagem-extras "
    )
    assert "left out of STRATAGEM_ONLY_PLUGINS" in line  # installed, and not to be installed again
    assert "pip install stratagem-extras" in program(command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("explain", "--strategy", "ddp"), "explain"),
        (("checkpoint", "consolidate", "saved.ckpt"), "checkpoint"),
    ],
)
def test_commands_of_extras_name_the_package_to_install(
    arguments: tuple[str, ...], name: str, program: Program
) -> None:
    program.plugins = [CORE]
    said = program(*arguments, code=2).stderr
    assert said.startswith(f"stratagem: error: No such command {name!r}. stratagem-extras ")


def test_a_full_form_that_cannot_be_imported_leaves_the_short_one(program: Program) -> None:
    program.plugins = [CORE]
    program.install(
        "reporting",
        """
        from stratagem.discovery import NameSpec, hookimpl

        @hookimpl
        def stratagem_components():
            yield NameSpec(name="stratagem.cli.doctor_report", target="no_such:report",
                           api_version=2)
        """,
    )
    done = program("doctor")
    assert "No problem found." in done.stdout
    assert "cannot import name 'stratagem.cli.doctor_report'" in done.stderr


# -- stratagem checkpoint

SAVE = """
import torch
from stratagem import Lite
lite = Lite(accelerator="cpu")
lite.launch()
contents = {"epoch": 3, "weights": torch.ones(9)}
lite.save("model.ckpt", contents)
torch.save(contents, "plain.ckpt")
"""


def test_checkpoint_inspect_shows_the_manifest(program: Program) -> None:
    program.python("-c", SAVE)
    table = program("checkpoint", "inspect", "model.ckpt").stdout
    assert row_of(table, "strategy") == ["strategy", "single_device"]
    assert row_of(table, "world size") == ["world size", "1"]
    assert row_of(table, "contents") == ["contents", "epoch, weights"]
    told = program.json("checkpoint", "inspect", "model.ckpt")
    assert told["stratagem"] == __version__
    assert told["epoch"] == 3
    assert told["bytes"] == program.folder.joinpath("model.ckpt").stat().st_size
    assert told["checksum"].startswith("xxh3_128 ")


def test_checkpoint_inspect_says_that_a_file_has_no_manifest(program: Program) -> None:
    program.python("-c", SAVE)
    said = program("checkpoint", "inspect", "plain.ckpt")
    assert said.stderr == "plain.ckpt has no manifest: plain torch made it\n"
    assert row_of(said.stdout, "bytes") == [
        "bytes",
        str(program.folder.joinpath("plain.ckpt").stat().st_size),
    ]


def test_checkpoint_inspect_refuses_other_files(program: Program) -> None:
    program.folder.joinpath("notes.txt").write_text("These are notes.")
    said = program("checkpoint", "inspect", "notes.txt", code=1).stderr
    assert said == (
        "'notes.txt' is not a whole checkpoint of any installed format: directory, single_file\n"
    )
    for options in ((), ("--format", "single_file")):
        assert program("checkpoint", "inspect", "nowhere.ckpt", *options, code=1).stderr == (
            "no checkpoint 'nowhere.ckpt'; the folder '.' contains no checkpoints\n"
        )


def test_checkpoint_verify_tells_whole_files_from_others(program: Program) -> None:
    program.python("-c", SAVE)
    path = program.folder / "model.ckpt"
    whole = path.read_bytes()
    (program.folder / "flipped.ckpt").write_bytes(
        whole[:900] + bytes([whole[900] ^ 1]) + whole[901:]
    )
    told = program("checkpoint", "verify", "model.ckpt").stdout
    assert told == f"model.ckpt: whole, {len(whole)} bytes, xxh3_128 {whole[-32:].decode()}\n"
    said = program("checkpoint", "verify", "flipped.ckpt", "plain.ckpt", "model.ckpt", code=1)
    assert said.stdout.startswith("model.ckpt: whole, ")
    damaged, plain = said.stderr.splitlines()
    assert damaged.startswith("'flipped.ckpt' is damaged: ")
    assert plain == (
        "'plain.ckpt' cannot be verified: it has no checksum, plain torch made it. Load it "
        "and save it again to give it one"
    )


EXAMPLE = Path(__file__).parents[4] / "examples/plugins/stratagem-onebit/src"
SAVE_IN_DATABASE = """
import torch
from stratagem import Lite
lite = Lite(accelerator="cpu", plugins="sqlite")
lite.launch()
lite.save("model.db", {"epoch": 3, "state_dict": {"weight": torch.ones(9)}})
"""


@pytest.fixture
def with_sqlite(program: Program, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program beside a third party's format, and a checkpoint of that format."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    code = "from stratagem_onebit.plugin import stratagem_components\n"
    program.install("databases", code)
    program.python("-c", SAVE_IN_DATABASE)
    return program


@pytest.mark.parametrize("options", [(), ("--format", "sqlite")])
def test_checkpoint_commands_know_a_third_partys_format(
    with_sqlite: Program, options: tuple[str, ...]
) -> None:
    told = with_sqlite.json("checkpoint", "inspect", "model.db", *options)
    assert told == {"format": "sqlite", "epoch": 3, "contents": ["epoch", "state_dict"]}
    table = with_sqlite("checkpoint", "inspect", "model.db", *options).stdout
    assert row_of(table, "format") == ["format", "sqlite"]
    assert row_of(table, "contents") == ["contents", "epoch, state_dict"]
    said = with_sqlite("checkpoint", "verify", "model.db", *options).stdout
    assert said == "model.db: whole, of the format 'sqlite'\n"
    said = with_sqlite("checkpoint", "convert", "model.db", "weights.safetensors", *options).stdout
    assert said.startswith("weights.safetensors: 1 tensors, ")
    said = with_sqlite("checkpoint", "consolidate", "model.db", "one.ckpt").stdout
    assert re.fullmatch(r"one\.ckpt: \d+ bytes, of a checkpoint of the format 'sqlite'\n", said)
    found = with_sqlite.json("checkpoint", "inspect", "one.ckpt")
    assert found["contents"] == ["epoch", "state_dict"]
    with_sqlite.folder.joinpath("one.ckpt").unlink()


def test_checkpoint_commands_name_the_formats_that_refused_a_file(
    with_sqlite: Program,
) -> None:
    whole = with_sqlite.folder.joinpath("model.db").read_bytes()
    with_sqlite.folder.joinpath("model.db").write_bytes(whole[:-3000])
    with_sqlite.folder.joinpath("notes.txt").write_text("These are notes.")
    why = {
        "model.db": "'model.db' is damaged in piece 0",
        "notes.txt": "'notes.txt' cannot be read",
    }
    for name in ("model.db", "notes.txt"):
        for command in ("inspect", "verify"):
            said = with_sqlite("checkpoint", command, name, code=1).stderr
            assert said.startswith(
                f"'{name}' is not a whole checkpoint of any installed format: directory, "
                f"single_file, sqlite ({why[name]}"
            )
            assert "truncated" not in said
    said = with_sqlite("checkpoint", "verify", "model.db", "--format", "sqlite", code=1).stderr
    assert said == "'model.db' is damaged in piece 0\n"
    said = with_sqlite("checkpoint", "inspect", "model.db", "--format", "sqlit", code=1).stderr
    assert "did you mean 'sqlite'?" in said.lower()


def test_checkpoint_commands_import_no_torch(program: Program) -> None:
    program.python("-c", SAVE)
    code = (
        "import sys\n"
        "sys.argv[1:] = ['checkpoint', 'verify', 'model.ckpt']\n"
        "from stratagem.cli import main\n"
        "print(main(), 'torch' in sys.modules)"
    )
    assert program.python("-c", code).stdout.endswith("\n0 False\n")


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(path: str, *, verify: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stratagem_extras.checkpoints.inspection.describe_checkpoint", interrupted)
    assert run_command(["checkpoint", "verify", "model.ckpt"]) == 130
    assert capsys.readouterr() == ("", "")


def test_options_of_average_may_stand_between_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "stratagem_extras.checkpoints.commands.load_target", lambda *_, **__: lambda *given: given
    )
    arguments = ["a.ckpt", "-o", "mean.ckpt", "b.ckpt", "--key", "x"]
    assert run_command(["checkpoint", "average", *arguments]) == 0
    paths = [Path("a.ckpt"), Path("b.ckpt")]
    assert capsys.readouterr().out == f"{(paths, Path('mean.ckpt'), 'x')}\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--kills", "0"], "--kills: expected a whole number of at least 1, received '0'"),
        (["--kills", "1.5"], "--kills: expected a whole number of at least 1, received '1.5'"),
        (["--size", "0.05"], "--size: expected a number of at least 0.1, received '0.05'"),
        (["--size", "nan"], "--size: expected a number of at least 0.1, received 'nan'"),
    ],
)
def test_numbers_of_durability_that_make_no_sense_are_refused(
    program: Program, option: list[str], message: str
) -> None:
    done = program("checkpoint", "durability", ".", *option, code=2)
    assert f"stratagem checkpoint durability: error: argument {message}\n" in done.stderr
