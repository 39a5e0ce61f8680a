"""`stratagem run`: real processes. Where torch is not what is tested, the scripts do without it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem_torch.launch.run import parse

TIMEOUT = 60.0  # seconds, for whatever should not take long


class Runs:
    """Starts `stratagem run` in a folder and, at the end, leaves nothing of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def script(self, code: str, name: str = "script.py") -> str:
        self.folder.joinpath(name).write_text(textwrap.dedent(code))
        return name

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("STRATAGEM_", "TORCHELASTIC_"))
            and name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        }
        kept["STRATAGEM_HINTS"] = "0"  # these loops read no loader
        process = subprocess.Popen(
            [sys.executable, "-m", "stratagem", "run", *arguments],
            cwd=self.folder,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code, (out, err)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def ranks(self, count: int) -> dict[int, int]:
        """Wait until that many ranks have left their process ids; return these by rank."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            files = list(self.folder.glob("pid*"))
            if len(files) == count:
                return {int(file.name[3:]): int(file.read_text()) for file in files}
            assert self.started[-1].poll() is None, self.started[-1].communicate()
            time.sleep(0.02)
        raise TimeoutError(f"{len(files)} of {count} ranks have started")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    for process in runs.started:
        process.kill()
        process.communicate()
    for file in tmp_path.glob("pid*"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass  # as it should be


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# A rank leaves its process id: written beside, then renamed, so that nobody reads half of it.
LEAVE_PID = """
import os, pathlib, signal, sys, time

def leave_pid():
    file = pathlib.Path("new" + os.environ["RANK"])
    file.write_text(str(os.getpid()))
    file.rename("pid" + os.environ["RANK"])

"""

WAIT = LEAVE_PID + "leave_pid()\ntime.sleep(100)\n"

TRAIN = (
    LEAVE_PID
    + """
import torch
from stratagem import Lite

lite = Lite(strategy="ddp", accelerator="cpu", devices=2)
lite.launch()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

def step():
    optimizer.zero_grad()
    inputs = torch.full((4, 3), 1.0 + lite.global_rank)
    lite.backward(model(inputs).sum())
    optimizer.step()

step()
"""
)


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["SCRIPT", "--devices", "2"], []),
        (["--devices=2", "SCRIPT"], []),
        (["SCRIPT", "--devices", "2", "--", "--lr", "0.1"], ["--lr", "0.1"]),
        (["SCRIPT", "--lr", "-0.1", "--devices", "2", "x", "-v"], ["--lr", "-0.1", "x", "-v"]),
        (["--devices", "2", "SCRIPT", "--", "--devices", "3"], ["--devices", "3"]),
        (["SCRIPT", "-hidden", "--dev", "7", "--devices", "2"], ["-hidden", "--dev", "7"]),
        (["SCRIPT", "--devices", "2", "a b", "--", "--", "c"], ["a b", "--", "c"]),
    ],
)
def test_run_passes_other_arguments_to_the_script_in_order(
    tmp_path: Path, arguments: list[str], expected: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    launch = parse([str(script) if text == "SCRIPT" else text for text in arguments])
    assert launch.script == str(script)
    assert launch.devices == 2
    assert list(launch.script_arguments) == expected


NODES = ["--num-nodes", "2", "--main-address", "host", "--main-port", "29500"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "2"], "expected a script to run: stratagem run train.py --devices 2"),
        (["script.py"], "the following arguments are required: --devices"),
        (
            ["script.py", "--devices", "0"],
            "argument --devices: expected a whole number of at least 1, received '0'",
        ),
        (
            ["script.py", "--devices", "two"],
            "argument --devices: expected a whole number of at least 1, received 'two'",
        ),
        (["missing.py", "--devices", "2"], "script='missing.py': there is no such file in "),
        (
            ["--lr", "script.py", "--devices", "2"],
            "'--lr' is not an option of this command. Options of the script come after the script",
        ),
        (
            ["--device=2", "script.py"],
            "'--device=2' is not an option of this command. Did you mean '--devices'? Options of ",
        ),
        (
            ["script.py", "--devices", "2", "--num-nodes", "2"],
            "--num-nodes 2 needs --main-address and --main-port and --node-rank as well, on each",
        ),
        (["script.py", "--devices", "2", *NODES], "--num-nodes 2 needs --node-rank as well"),
        (
            ["script.py", "--devices", "2", *NODES, "--node-rank", "2"],
            "--node-rank 2: expected 0 to 1, since --num-nodes is 2",
        ),
        (
            ["script.py", "--devices", "2", "--node-rank", "1"],
            "--node-rank is for several nodes: give --num-nodes as well",
        ),
        (["script.py", "--devices", "2", "--log-dir", "script.py"], "--log-dir: [Errno 17]"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    runs: Runs, arguments: list[str], message: str
) -> None:
    runs.script("open('it_ran', 'w')")
    done = runs(*arguments, code=2)
    assert f"stratagem run: error: {message}" in done.stderr
    assert not runs.folder.joinpath("it_ran").exists()


# -- what the ranks are given

TELL = """
import json, os, pathlib, sys

names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "OMP_NUM_THREADS", "STRATAGEM_CLUSTER", "STRATAGEM_LISTEN_FD"]
found = {name: os.environ.get(name) for name in names}
found["arguments"] = sys.argv[1:]
pathlib.Path("told" + os.environ["RANK"]).write_text(json.dumps(found))
"""


def told(runs: Runs, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runs.folder.joinpath(f"told{rank}").read_text())
    return found


def test_run_sets_the_rank_variables_and_arguments(runs: Runs) -> None:
    runs(runs.script(TELL), "--devices", "2", "--lr", "0.1")
    first, second = told(runs, 0), told(runs, 1)
    for rank, found in ((0, first), (1, second)):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["NODE_RANK"] == "0"
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert found["STRATAGEM_CLUSTER"] == "plain"
        assert found["arguments"] == ["--lr", "0.1"]
        assert int(found["OMP_NUM_THREADS"]) >= 1
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["STRATAGEM_LISTEN_FD"] is not None
    assert second["STRATAGEM_LISTEN_FD"] is None


def test_rank_0_alone_is_handed_the_listening_socket(runs: Runs) -> None:
    runs.script("""
        import os, pathlib, socket, sys

        fds = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                listener = socket.socket(fileno=os.dup(int(fd)))
                if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    fds.append((fd, listener.getsockname()[1]))
            except OSError:
                pass  # not a socket
        expected = []
        if os.environ["RANK"] == "0":
            expected = [(os.environ["STRATAGEM_LISTEN_FD"], int(os.environ["MASTER_PORT"]))]
        sys.exit(fds != expected)
    """)
    runs("script.py", "--devices", "2")


def test_a_node_of_several_has_its_share_of_the_ranks(runs: Runs) -> None:
    runs(runs.script(TELL), "--devices", "2", *NODES, "--node-rank", "1")
    found = told(runs, 3)
    assert (found["LOCAL_RANK"], found["NODE_RANK"], found["WORLD_SIZE"]) == ("1", "1", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("host", "29500")
    assert found["STRATAGEM_LISTEN_FD"] is None


def test_the_program_itself_imports_nothing_heavy(runs: Runs) -> None:
    runs.script(TELL)
    code = """
import sys
from stratagem.cli import main

sys.argv = ["stratagem", "run", "script.py", "--devices", "1"]
code = main()
print(code, {"torch", "jsonargparse", "rich", "pluggy"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=runs.folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0 set()\n"


# -- training


def test_ranks_that_a_rank_has_started_are_ranks_of_their_own(runs: Runs) -> None:
    inner = runs.folder / "inner.py"
    inner.write_text(
        "from stratagem import Lite\n"
        "lite = Lite(accelerator='cpu')\n"
        "lite.launch()\n"
        "lite.print('inner', lite.world_size)\n"
    )
    outer = runs.script(
        "import subprocess, sys\n"
        "from stratagem import Lite\n"
        "Lite(accelerator='cpu')\n"
        "lite = Lite(strategy='ddp', accelerator='cpu', devices=2)\n"
        "lite.launch()\n"
        "command = [sys.executable, '-m', 'stratagem', 'run', 'inner.py', '--devices', '2']\n"
        "if lite.is_global_zero:\n"
        "    subprocess.run(command, check=True)\n"
        "lite.barrier()\n"
    )
    done = subprocess.run(
        [sys.executable, outer],
        cwd=runs.folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9
    assert said == ["inner 2"], done.stderr


def test_two_ranks_train_together(runs: Runs) -> None:
    ending = """
import json

weights = [p.detach().flatten().tolist() for p in model.parameters()]
pathlib.Path(f"weights{lite.global_rank}").write_text(json.dumps([lite.world_size, weights]))
"""
    runs(runs.script(TRAIN + ending), "--devices", "2")
    first = runs.folder.joinpath("weights0").read_text()
    assert runs.folder.joinpath("weights1").read_text() == first

    import torch

    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    # The mean of the two ranks' gradients: inputs of 1 and of 2, four of each summed.
    expected = [alone.weight.detach().flatten() - 0.1 * 4 * 1.5, alone.bias.detach() - 0.1 * 4]
    world_size, weights = json.loads(first)
    assert world_size == 2
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), wanted)


@pytest.mark.parametrize("seconds_to_end", [0, 2])
def test_a_failing_rank_is_named_once_with_its_traceback_and_ends_all(
    runs: Runs, seconds_to_end: int
) -> None:
    # Where it takes its time to end, the one that has lost its connection to it ends before.
    ending = f"""
leave_pid()
if lite.global_rank == 1:
    import atexit
    atexit.register(time.sleep, {seconds_to_end})
    while not pathlib.Path("pid0").exists():
        time.sleep(0.01)
    raise ValueError("no such luck")
while True:
    step()
"""
    done = runs(runs.script(TRAIN + ending), "--devices", "2", code=1)
    assert done.stderr.startswith(
        "rank 1 of 2 failed with exit code 1; its traceback:\n\nTraceback"
    )
    assert done.stderr.endswith("ValueError: no such luck\n")
    assert done.stderr.count("Traceback") == 1
    assert not any(map(is_running, runs.ranks(2).values()))


def test_a_killed_rank_is_named_with_its_signal(runs: Runs) -> None:
    script = runs.script(TRAIN + "leave_pid()\nwhile True:\n    step()\n")
    process = runs.start(script, "--devices", "2")
    ranks = runs.ranks(2)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGKILL
    assert err.startswith("rank 1 of 2 was ended by SIGKILL")
    assert "Traceback" not in err
    assert not any(map(is_running, ranks.values()))


def test_no_rank_outlives_the_killed_program(runs: Runs) -> None:
    process = runs.start(runs.script(TRAIN + "leave_pid()\ntime.sleep(100)\n"), "--devices", "2")
    ranks = runs.ranks(2)
    process.kill()
    deadline = time.monotonic() + 5.0
    while any(map(is_running, ranks.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, ranks.values()))


# -- ends


def test_run_exits_with_the_code_of_the_first_failed_rank(runs: Runs) -> None:
    code = """
leave_pid()
while not pathlib.Path("pid0").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    sys.exit(7)
time.sleep(100)
"""
    process = runs.start(runs.script(LEAVE_PID + code), "--devices", "2")
    ranks = runs.ranks(2)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 7
    assert err == (
        "rank 1 of 2 failed with exit code 7; it exited without a Python traceback; its output is "
        "above\nFor an explanation: stratagem errors rank-failed\n"
    )
    assert not any(map(is_running, ranks.values()))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_program_ends_every_rank(
    runs: Runs, number: signal.Signals, code: int
) -> None:
    # The program would respect what the tests themselves are told to ignore, as under nohup.
    before = signal.signal(number, signal.SIG_DFL)
    process = runs.start(runs.script(WAIT), "--devices", "2")
    signal.signal(number, before)
    ranks = runs.ranks(2)
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code
    assert "rank" not in err
    assert not any(map(is_running, ranks.values()))


# A process of its own, since pytest's has threads, with which it should not fork.
ON_A_TERMINAL = """
import os, pathlib, pty, sys, time

process, terminal = pty.fork()
if process == 0:
    os.execv(sys.executable, [sys.executable, "-m", "stratagem", *sys.argv[1:]])
while len(list(pathlib.Path().glob("pid*"))) < 2:
    time.sleep(0.02)
os.write(terminal, b"\\x03")
_, status = os.waitpid(process, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_ranks_hear_ctrl_c_on_a_terminal_once_and_may_end_in_order(runs: Runs) -> None:
    runs.script(
        LEAVE_PID
        + """
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
leave_pid()
while not heard:
    time.sleep(0.01)
time.sleep(0.3)
pathlib.Path("heard" + os.environ["RANK"]).write_text(str(len(heard)))
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", ON_A_TERMINAL, "run", "script.py", "--devices", "2"],
        cwd=runs.folder,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 130
    assert [runs.folder.joinpath(f"heard{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_a_second_ctrl_c_kills_ranks_that_do_not_end(runs: Runs) -> None:
    code = """
signal.signal(signal.SIGINT, lambda *_: pathlib.Path("heard" + os.environ["RANK"]).touch())
leave_pid()
while True:
    time.sleep(0.01)
"""
    process = runs.start(runs.script(LEAVE_PID + code), "--devices", "2")
    ranks = runs.ranks(2)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + TIMEOUT
    while len(list(runs.folder.glob("heard*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5.0)
    assert process.returncode == 130
    assert not any(map(is_running, ranks.values()))


def test_each_rank_writes_to_its_log(runs: Runs) -> None:
    code = "import os, sys; print('out', os.environ['RANK']); sys.exit(os.environ['RANK'] == '1')"
    done = runs(runs.script(code), "--devices", "2", "--log-dir", "logs/here", code=1)
    logs = runs.folder / "logs" / "here"
    assert done.stdout == ""
    assert done.stderr == (
        "rank 1 of 2 failed with exit code 1; it exited without a Python traceback; its output is "
        "in logs/here/rank1.log\nFor an explanation: stratagem errors rank-failed\n"
    )
    assert logs.joinpath("rank1.log").read_text() == "out 1\n"


def test_a_script_that_fails_once_succeeds_with_a_restart(runs: Runs) -> None:
    runs.script("""
        import os, pathlib, sys

        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        pathlib.Path(f"attempt{attempt}rank{os.environ['RANK']}").write_text(" ".join(sys.argv[1:]))
        sys.exit(attempt == "0" and os.environ["RANK"] == "1")
    """)
    runs("script.py", "--devices", "2", "--max-restarts", "1", "--lr", "0.1")
    assert runs.folder.joinpath("attempt0rank1").exists()
    for rank in (0, 1):
        assert runs.folder.joinpath(f"attempt1rank{rank}").read_text() == "--lr 0.1"
