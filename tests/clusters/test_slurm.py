"""Real SLURM over two hosts: ranks, steps at the same time, a signal, a requeue, a resume."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

Train = Callable[..., list[str]]
Results = Callable[..., list[dict[str, Any]]]


def test_ranks_of_one_and_of_two_a_node_train_together(
    slurm: Any, train: Train, results: Results, reference: Any, tmp_path: Path
) -> None:
    job = slurm.submit(
        tmp_path,
        # Without --ntasks a step has as many tasks as the job.
        f"srun --ntasks=2 --ntasks-per-node=1 {shlex.join(train('one'))}\n"
        f"srun --ntasks=4 --ntasks-per-node=2 {shlex.join(train('two'))}",
        "--nodes=2",
        "--ntasks-per-node=2",
    )
    text = job.wait()
    for name, of_a_node in (("one", 1), ("two", 2)):
        ranks = results(name)
        assert len(ranks) == 2 * of_a_node, text
        expected = pytest.approx(reference(2 * of_a_node), abs=1e-6)
        for rank, result in enumerate(ranks):
            assert result["environment"] == "SLURM"
            assert result["ranks"] == [rank, rank % of_a_node, rank // of_a_node]
            assert result["host"] == f"node{1 + rank // of_a_node}"
            assert result["main"][0] == "node1"
            assert result["weights"] == expected


def test_steps_of_one_allocation_run_at_the_same_time(
    slurm: Any, train: Train, results: Results, tmp_path: Path
) -> None:
    both = "srun --exact --nodes=2 --ntasks=2 --ntasks-per-node=1"
    second = "srun --exact --nodes=1 --ntasks=2 --nodelist=node2"
    job = slurm.submit(
        tmp_path,
        f"{both} {shlex.join(train('a', seconds=0.3))} &\n"
        f"{both} {shlex.join(train('b', seconds=0.3))} &\n"
        f"{second} {shlex.join(train('c', seconds=0.3))} &\n"
        "wait",
        "--nodes=2",
        "--ntasks-per-node=4",
    )
    text = job.wait()
    a, b, c = (results(name) for name in "abc")
    assert [len(a), len(b), len(c)] == [2, 2, 2], text
    assert {each["main"][0] for each in (*a, *b)} == {"node1"}
    assert {each["main"][0] for each in c} == {"node2"}
    assert a[0]["main"][1] != b[0]["main"][1]
    for each in (a, b, c):
        assert each[0]["weights"] == each[1]["weights"] == a[0]["weights"]


def test_a_batch_script_that_runs_python_directly_is_no_rank(slurm: Any, tmp_path: Path) -> None:
    explain = f"{sys.executable} -m stratagem explain --strategy ddp --devices 2 --why"
    text = slurm.submit(tmp_path, explain, "--nodes=2", "--ntasks-per-node=1").wait()
    assert "cluster_environment  plain" in text
    assert "SLURM_STEP_ID is not set, though SLURM_JOB_ID is" in text
    assert "launcher             script" in text


def test_devices_that_differ_from_the_tasks_are_refused(
    slurm: Any, train: Train, tmp_path: Path
) -> None:
    command = f"srun --ntasks-per-node=1 {shlex.join(train(devices=2))}"
    text = slurm.submit(tmp_path, command, "--nodes=2", "--ntasks-per-node=1").wait()
    assert "devices='2' means 2 process(es) on each node, but SLURM has started 1 here" in text
    assert "(SLURM_STEP_TASKS_PER_NODE=1(x2), SLURM_NTASKS=2)" in text


def test_upon_its_signal_a_job_is_saved_queued_again_and_resumed(
    slurm: Any, train: Train, results: Results, reference: Any, tmp_path: Path
) -> None:
    command = train(seconds=0.3, steps=40, save_every=100)
    job = slurm.submit(
        tmp_path,
        f"srun {shlex.join(command)}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--requeue",
    )
    job.wait_for("step 5 ")
    job.signal("USR1")
    job.wait_for("SIGUSR1: training ends here, saved as ")
    job.wait_for("was started again: resuming from ", timeout=180)
    text = job.wait()
    assert "the job is queued again" in text
    ranks = results()
    assert len(ranks) == 2, text
    assert ranks[0]["first_step"] == ranks[1]["first_step"] >= 5
    assert ranks[0]["weights"] == pytest.approx(reference(2, steps=40, save_every=100), abs=1e-6)


def test_before_its_time_is_over_a_job_is_queued_again_and_resumed(
    slurm: Any, train: Train, results: Results, tmp_path: Path
) -> None:
    job = slurm.submit(
        tmp_path,
        f"srun {shlex.join(train(seconds=1.0, steps=100, save_every=200))}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--requeue",
        "--time=2",
        # SLURM sends it up to a minute earlier than asked for: 30 s after the start or later, when
        # the ranks have begun to train, and before they are done.
        "--signal=USR1@30",
    )
    job.wait_for("was started again: resuming from ", timeout=240)
    job.wait(timeout=300)
    assert [len(results()), results()[0]["first_step"] > 0] == [2, True]


def test_a_job_that_is_preempted_is_saved_and_resumed(
    slurm: Any, train: Train, results: Results, tmp_path: Path
) -> None:
    folder = tmp_path / "high"
    folder.mkdir()
    job = slurm.submit(
        tmp_path,
        f"srun {shlex.join(train(seconds=0.3, steps=40, save_every=100))}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--exclusive",
        "--requeue",
    )
    job.wait_for("step 5 ")
    slurm.submit(folder, "sleep 2", "--nodes=2", "--exclusive", "--partition=high")
    job.wait_for("SIGTERM: training ends here, saved as ")
    job.wait_for("the job is queued again")
    job.wait_for("was started again: resuming from ", timeout=180)
    text = job.wait()
    assert len(results()) == 2, text
    assert results()[0]["first_step"] >= 5


def test_a_job_that_is_cancelled_is_saved_and_not_queued_again(
    slurm: Any, train: Train, tmp_path: Path
) -> None:
    job = slurm.submit(
        tmp_path,
        f"srun {shlex.join(train(seconds=0.3, steps=100, save_every=100))}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--requeue",
    )
    job.wait_for("step 5 ")
    slurm.ask(f"scancel {job.number}")
    text = job.wait()
    assert "SIGTERM: training ends here, saved as " in text
    assert "queued again" not in text
