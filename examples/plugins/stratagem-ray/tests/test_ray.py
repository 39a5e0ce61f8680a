"""Two ranks on a Ray cluster of this machine: what they return, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_programs import HERE, Program, Told, clean_environment, wait_until

from stratagem import Lite
from stratagem.errors import ConfigurationError
from stratagem_ray import RayEnvironment, RayLauncher

Start = Callable[..., "Program"]


@pytest.fixture
def told(tmp_path: Path) -> Any:
    """What the ranks tell that write to this test's folder."""
    return Told(tmp_path / "run")


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def none_is_left(told: Told) -> bool:
    return not any(is_alive(start["pid"]) for rank in (0, 1) for start in told.starts(rank))


def test_ray_ranks_train_like_ranks_without_ray(start: Start, told: Told, tmp_path: Path) -> None:
    program = start(told.out, "--plugin=name", "--steps=8")
    program.wait()
    reference = start(tmp_path / "reference", "--plugin=none", "--steps=8")
    reference.wait()
    assert program.result() == reference.result()
    (first,), (second,) = told.starts(0), told.starts(1)
    assert [first["ranks"], second["ranks"]] == [[0, 0, 0], [1, 1, 0]]
    assert first["argv"][1:] == [str(told.out), "--devices=2", "--plugin=name", "--steps=8"]
    # What ranks print comes out here, with the rank before it.
    assert "(rank 1 pid=" in program.text()
    assert "rank 1 has begun" in program.text()


def test_a_killed_rank_is_started_again_and_the_run_goes_on_exactly(
    start: Start, told: Told, tmp_path: Path
) -> None:
    program = start(told.out, "--steps=20", "--pause=0.2")
    wait_until(told.have_taken(6), program.text)
    os.kill(told.starts(1)[0]["pid"], signal.SIGKILL)
    program.wait()
    assert "stratagem: rank 1 of 2 was lost, by a signal such as SIGKILL" in program.text()
    assert "stratagem: all ranks are started again (1 of 3)" in program.text()
    assert [each["restart"] for each in told.starts(0)] == [0, 1]

    again = Told(tmp_path / "again")
    undisturbed = start(again.out, "--steps=20", f"--resume={told.resumed_from()}")
    undisturbed.wait()
    told.check_went_on_as(again)
    assert program.result() == undisturbed.result()
    wait_until(lambda: none_is_left(told), lambda: "ranks are left")


def test_a_rank_that_is_lost_too_often_ends_the_run(start: Start, told: Told) -> None:
    program = start(told.out, "--steps=50", "--pause=0.2", '--options={"max_restarts": 0}')
    wait_until(told.have_taken(2), program.text)
    os.kill(told.starts(0)[0]["pid"], signal.SIGKILL)
    text = program.wait(expect=1)
    assert "RankFailedError: rank 0 of 2 was lost, by a signal" in text
    assert "started again" not in text


def test_a_rank_that_raises_ends_the_run_with_its_traceback(start: Start, told: Told) -> None:
    text = start(told.out, "--fails-at=3").wait(expect=1)
    assert "RankFailedError: rank 1 of 2 failed with exit code 1; its traceback:" in text
    assert text.rstrip().endswith("ValueError: no good on rank 1")
    assert "started again" not in text
    wait_until(lambda: none_is_left(told), lambda: "ranks are left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_lets_them_save(
    number: signal.Signals, start: Start, told: Told
) -> None:
    program = start(told.out, "--steps=400", "--pause=0.2")
    wait_until(told.have_taken(2), program.text)
    os.kill(program.process.pid, number)
    # Python's own end upon Ctrl-C is by the signal itself.
    program.wait(expect=-signal.SIGINT if number == signal.SIGINT else 128 + number)
    wait_until(lambda: none_is_left(told), lambda: "ranks are left")
    if number == signal.SIGTERM:
        assert list((told.out / "checkpoints").glob("interrupted-step=*.ckpt"))


def test_a_killed_launching_process_leaves_no_rank(start: Start, told: Told) -> None:
    program = start(told.out, "--steps=400", "--pause=0.2")
    wait_until(told.have_taken(2), program.text)
    os.kill(program.process.pid, signal.SIGKILL)
    wait_until(lambda: none_is_left(told), lambda: "ranks are left")


def test_ranks_of_a_node_see_its_gpus_in_the_order_of_local_ranks(start: Start, told: Told) -> None:
    start(told.out, "--steps=1", '--options={"resources_per_rank": {"GPU": 1}}').wait()
    seen = {told.starts(rank)[0]["gpus"] for rank in (0, 1)}
    assert seen in ({"0,1"}, {"1,0"})


def test_ray_cluster_without_room_names_missing_resources(start: Start, told: Told) -> None:
    options = {"timeout": 6, "resources_per_rank": {"CPU": 1, "forklift": 1}}
    text = start(told.out, f"--options={json.dumps(options)}").wait(expect=1)
    room = "1 node(s) with CPU: 2, forklift: 2 each (SPREAD)"
    missing = "forklift: 2 are needed, 0 of 0 are free"
    assert f"stratagem: waiting up to 6 s for {room}; {missing}" in text
    assert f"ConfigurationError: the Ray cluster has had no room for {room} in 6 s" in text


def test_without_a_cluster_one_is_started_on_loopback_and_ended(
    tmp_path: Path, for_rays_own: dict[str, str]
) -> None:
    program = Program(
        [sys.executable, str(HERE / "local.py")],
        tmp_path / "local.txt",
        clean_environment(HOME=str(tmp_path), RAY_TMPDIR=for_rays_own["RAY_TMPDIR"]),
    )
    try:
        program.wait()
        told = json.loads(program.text().splitlines()[-1])
    finally:
        program.kill()
    assert told["result"] == ["hello", 2, 1.0]
    assert told["listening"], "Ray's processes have to listen somewhere"
    assert set(told["listening"]) <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}
    assert told["left"] == []
    assert told["variables_before"] == told["variables_after"]


def test_an_address_where_no_cluster_is_is_refused() -> None:
    lite = Lite(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        plugins=RayLauncher(address="127.0.0.1:1"),
    )
    with pytest.raises(ConfigurationError, match=r"no Ray cluster can be reached at '127.0.0.1:1'"):
        lite.launch(print)


# -- without a cluster


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"placement": "EVERYWHERE"}, "placement='EVERYWHERE': expected one of 'SPREAD'"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number of at least 0"),
        ({"resources_per_rank": {"CPU": "many"}}, "resources_per_rank={'CPU': 'many'}: expected"),
        (
            {"resources_per_rank": {"GPU": 0.5}},
            "resources_per_rank={'GPU': 0.5}: each rank uses",
        ),
        ({"timeout": 0}, "timeout=0: expected seconds, more than 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        RayLauncher(**options)
    assert str(refused.value).startswith(text)


def test_devices_are_a_number_since_ray_chooses_them() -> None:
    lite = Lite(accelerator="gpu", strategy="ddp", devices=[1, 3], plugins="ray")
    with pytest.raises(ConfigurationError, match=r"devices=\[1, 3\] chooses devices, which Ray"):
        lite.launch(print)


def test_the_plan_names_the_launcher_and_the_environment_of_its_ranks() -> None:
    lite = Lite(accelerator="cpu", strategy="ddp", devices=2, num_nodes=3, plugins="ray")
    assert lite.plan.world_size == 6
    assert lite.plan.launcher.provider.startswith("stratagem-ray ")
    assert lite.plan.cluster_environment.name == "ray_ranks"
    assert isinstance(lite.strategy.cluster_environment, RayEnvironment)


def test_listing_strategies_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys, stratagem\n"
        "assert 'ddp' in stratagem.StrategyRegistry\n"
        "assert 'stratagem_ray.plugin' in sys.modules\n"
        "print(sorted({'ray', 'torch', 'stratagem_ray.launcher'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
