"""A launcher written by a stranger, with public names only, starts any strategy's ranks."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointError,
    ConfigurationError,
)
from stratagem.launch import pack, pack_result, rank_failure, unpack_result
from stratagem.plan.plan import RunPlan
from stratagem.state import check_safe_data, from_bytes, to_bytes

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

JOB = (SCRIPTS / "strangers_launcher_job.py").read_text()


@pytest.fixture
def run_job(run_script: RunScript, tmp_path: Path) -> Callable[..., Any]:
    """Run a script that imports the job, and return what it prints last, as JSON."""
    (tmp_path / "job.py").write_text(JOB)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}

    def run(text: str, **options: Any) -> Any:
        finished = run_script(text, env=env, **options)
        return json.loads(finished.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mine"])
def test_subprocess_launcher_returns_the_trained_weights(
    strategy: str, run_job: Callable[..., Any]
) -> None:
    assert run_job(
        f"""
        import json
        import torch
        from job import SubprocessLauncher, register, trained

        register()
        expected = trained(strategy="ddp_fork")
        given = SubprocessLauncher() if {strategy!r} == "ddp" else "subprocesses"
        print(json.dumps(torch.allclose(trained(strategy={strategy!r}, plugins=given), expected)))
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mine"])
def test_subprocess_launcher_serves_lite_on_two_nodes(
    strategy: str, run_job: Callable[..., Any]
) -> None:
    assert run_job(
        f"""
        import json
        from job import DDPStrategy, Lite, SubprocessLauncher, job, register

        register()
        options = dict(accelerator="cpu", devices=1, num_nodes=2)
        if {strategy!r} == "ddp":
            options["strategy"] = DDPStrategy(launcher=SubprocessLauncher())
        else:
            options.update(strategy={strategy!r}, plugins=["subprocesses"])
        print(json.dumps(Lite(**options).launch(job, "hello")))
        """
    ) == ["hello", 2, 2, 1.0]


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_traceback(run_job: Callable[..., Any]) -> None:
    rank, text = run_job(
        """
        import json
        from job import SubprocessLauncher, trained
        from stratagem.errors import RankFailedError

        try:
            trained(fails_on=1, strategy="ddp", plugins=SubprocessLauncher())
        except RankFailedError as error:
            print(json.dumps([error.rank, str(error)]))
        """
    )
    assert rank == 1
    assert text.startswith("rank 1 of 2 failed with exit code 1; its traceback:")
    assert "ValueError: no good on rank 1" in text


@pytest.mark.slow
def test_cloudpickle_packs_functions_of_the_script(
    run_job: Callable[..., Any],
) -> None:
    pytest.importorskip("cloudpickle")
    assert (
        run_job(
            """
        import json
        from job import Lite, SubprocessLauncher

        def main(lite, numbers):
            return sum(numbers) + lite.global_rank

        lite = Lite(accelerator="cpu", devices=1, strategy="ddp", plugins=SubprocessLauncher())
        print(json.dumps(lite.launch(main, [1, 2])))
        """
        )
        == 3
    )


@pytest.mark.slow
def test_ranks_read_the_launchers_own_environment_and_the_scripts_arguments(
    run_job: Callable[..., Any],
) -> None:
    assert run_job(
        """
        import json, sys
        from job import Lite, register, where
        from strangers_launcher import RestartingLauncher

        register()
        sys.argv[1:] = ["--rate", "0.1"]
        lite = Lite(accelerator="cpu", devices=1, strategy="ddp", plugins=RestartingLauncher())
        assert "that of RestartingLauncher's ranks" in lite.plan.explain()
        print(json.dumps(lite.launch(where)))
        """
    ) == ["of a stranger", 1, ["--rate", "0.1"]]


def test_a_rank_on_another_machine_has_the_seed_of_the_script(run_job: Callable[..., Any]) -> None:
    assert run_job(
        """
        import json, os
        from job import Lite, seeds
        from stratagem import seed_everything
        from stratagem.launch import pack, rank_environment, run_packed

        plan = Lite(accelerator="cpu", strategy="ddp_spawn", devices=1).plan
        seed_everything(7, workers=True)
        data = pack(plan, seeds)
        for name in ("STRATAGEM_SEED", "STRATAGEM_SEED_WORKERS"):
            del os.environ[name]  # as on another machine
        own = rank_environment(local_rank=0, local_world_size=1, main_port=1)
        print(json.dumps(run_packed(data, own)))
        """
    ) == ["7", "1"]


def test_a_rank_that_exits_has_left_its_group(run_job: Callable[..., Any]) -> None:
    assert run_job(
        """
        import json
        from job import Lite, join_and_leave, torch
        from stratagem.launch import free_port, pack, rank_environment, run_packed

        plan = Lite(accelerator="cpu", strategy="ddp_spawn", devices=1).plan
        data = pack(plan, join_and_leave)
        own = rank_environment(local_rank=0, local_world_size=1, main_port=free_port())
        try:
            run_packed(data, own)
        except SystemExit as leaving:
            print(json.dumps([leaving.code, torch.distributed.is_initialized()]))
        """
    ) == [7, False]


def test_pack_result_refuses_unsafe_types() -> None:
    weights = torch.nn.Linear(2, 1).state_dict()
    returned = unpack_result(pack_result({"weights": weights, "losses": (0.5, None)}))
    assert torch.equal(returned["weights"]["bias"], weights["bias"])
    assert returned["losses"] == (0.5, None)
    with pytest.raises(
        ConfigurationError, match="comes back from another process, as weights-only-safe data"
    ):
        pack_result({"model": torch.nn.Linear(2, 1)})
    with pytest.raises(CheckpointError, match="what rank 0 has returned"):
        unpack_result(pickle.dumps(double))


def test_an_author_makes_bytes_of_safe_data_and_has_them_back() -> None:
    shared = torch.arange(4.0)
    data = {
        "numbers": [True, 2, 0.5, 1j, None],
        "empty": [{}, [], (), set(), "", b"", bytearray()],
        ("a", 1): {"sets": {1, 2}, "order": OrderedDict(b=1), "counts": Counter("aab")},
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        "tensors": [shared, shared[:2], torch.nn.Parameter(torch.ones(2))],
    }
    back = from_bytes(to_bytes(data, "a.ckpt"), "a.ckpt")
    first, part, parameter = back.pop("tensors")
    data.pop("tensors")
    assert back == data
    assert [type(one) for one in back["empty"]] == [dict, list, tuple, set, str, bytes, bytearray]
    first[0] = 7.0
    assert part[0] == 7.0
    assert torch.equal(parameter, torch.ones(2))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (numpy.float64(0.5), "checkpoint['rates'][0] is of type numpy.float64"),
        (Path("a"), "checkpoint['rates'][0] is of type pathlib."),
        (frozenset(), "checkpoint['rates'][0] is of type builtins.frozenset"),
        (torch.ones(1).expand(2**40), "checkpoint['rates'][0] is a tensor of 4398046511104 bytes"),
    ],
)
def test_check_safe_data_names_the_place_of_unsafe_values(value: Any, where: str) -> None:
    for ask in (check_safe_data, to_bytes):
        with pytest.raises(CheckpointContentError) as caught:
            ask({"rates": [value]}, "a.ckpt")
        assert str(caught.value).startswith(f"cannot save a.ckpt: {where}")


def test_bytes_that_hold_no_safe_data_are_refused() -> None:
    for stored in (b"", b"other", pickle.dumps(double), to_bytes([1], "a")[:-40]):
        with pytest.raises(CheckpointCorruptError, match=r"^'a\.ckpt'"):
            from_bytes(stored, "a.ckpt")


def test_an_author_says_how_a_rank_was_lost() -> None:
    error = rank_failure(1, 4, how="was lost with node2")
    assert str(error).startswith(
        "rank 1 of 4 was lost with node2; it exited without a Python traceback"
    )


# -- what an author gets wrong


@pytest.fixture
def plan() -> RunPlan:
    from stratagem import Lite

    return Lite(accelerator="cpu", strategy="ddp_spawn", devices=2).plan


def double(number: int) -> int:
    return 2 * number


def test_ranks_of_another_number_than_planned_are_refused(
    run_job: Callable[..., Any], plan: RunPlan
) -> None:
    message = run_job(
        """
        import json, operator
        from stratagem import Lite
        from stratagem.errors import ConfigurationError
        from stratagem.launch import pack, rank_environment, run_packed

        plan = Lite(accelerator="cpu", strategy="ddp_spawn", devices=2).plan
        data = pack(plan, operator.neg, (3,))
        print(run_packed(data, rank_environment(local_rank=0, local_world_size=2, main_port=1)))
        try:
            run_packed(data, rank_environment(local_rank=0, local_world_size=3, main_port=1))
        except ConfigurationError as error:
            print(json.dumps(str(error)))
        """
    )
    assert message.startswith("WORLD_SIZE=3 in this rank's environment, but the plan has 2 ranks")


def test_pack_names_the_argument_that_cannot_be_pickled(plan: RunPlan) -> None:
    with pytest.raises(ConfigurationError, match=r"launcher 'spawn'\), and dict\['lock'\]"):
        pack(plan, double, ({"lock": threading.Lock()},))


def test_run_packed_explains_unreadable_bytes(run_job: Callable[..., Any]) -> None:
    message = run_job(
        """
        import json
        from stratagem.errors import ConfigurationError
        from stratagem.launch import rank_environment, run_packed

        try:
            run_packed(b"cnowhere\\nnothing\\n.", rank_environment(
                local_rank=0, local_world_size=1, main_port=1))
        except ConfigurationError as error:
            print(json.dumps(str(error)))
        """
    )
    assert message.startswith("a rank cannot read what was packed for it (ModuleNotFoundError")
    assert "install cloudpickle" in message
