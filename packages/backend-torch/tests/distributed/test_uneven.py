"""Ranks with different numbers of training batches: a clear error, or training by join."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem import Lite

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

# What the scripts and the reference runs in this process share.
COMMON = (SCRIPTS / "uneven_common.py").read_text()

SCRIPT = (
    COMMON
    + """
out, weights = {}, {}
lite = Lite("cpu", "ddp", devices=2)
lite.launch()
rank = lite.global_rank
own = batches(rank, LENGTHS[rank])


def attempt(name, action):
    try:
        action()
        out[name] = "trained"
    except Exception as error:
        out[name] = f"{type(error).__name__}: {error}"


def fit(data, strategy="ddp", module=Net, ckpt_path=None, **arguments):
    net = module()
    made = trainer(strategy, **arguments)
    made.fit(net, data, ckpt_path=ckpt_path)
    return net, made


def stream(items):
    return DataLoader(Stream(items), batch_size=None)


# -- refused
attempt("known", lambda: fit(own))
attempt("unknown", lambda: fit(stream(own)))
attempt("unknown, two to a step", lambda: fit(stream(own), accumulate_grad_batches=2))
attempt("nothing on rank 0", lambda: fit(stream(own[: 3 * rank])))
attempt("nothing", lambda: fit(stream([])))
joining = DDPStrategy(join_uneven_inputs=True)
attempt("manual", lambda: fit(own, joining, Manual))

# -- as many
attempt("limited", lambda: fit(own, limit_train_batches=5))
attempt("a limit that one does not reach", lambda: fit(stream(own), limit_train_batches=6))
net, _ = fit(batches(rank, 5), max_epochs=2)
weights["with length"] = net.net.state_dict()
net, _ = fit(stream(batches(rank, 5)), max_epochs=2)
weights["without length"] = net.net.state_dict()

# -- joined
for name, strategy, data, accumulate in (
    ("known", DDPStrategy(join_uneven_inputs=True), own, 1),
    ("unknown", DDPStrategy(join_uneven_inputs=True), stream(own), 1),
    ("sharded", DDPShardedStrategy(join_uneven_inputs=True), own, 1),
    ("accumulated", DDPStrategy(join_uneven_inputs=True), own, 2),
):
    net, made = fit(data, strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    weights[name] = net.net.state_dict()
    out[name + " logged"] = {
        key: float(value) for key, value in made.callback_metrics.items() if key == "batches"
    }
    out[name + " steps"] = made.global_step
out["seen"] = lite.strategy.ranks.gather_objects(net.seen)

_, made = fit(own, DDPStrategy(join_uneven_inputs=True), max_steps=6)
made.save_checkpoint("middle.ckpt")
net, made = fit(own, DDPStrategy(join_uneven_inputs=True), ckpt_path="middle.ckpt", max_epochs=2)
weights["resumed"] = net.net.state_dict()


# -- Lite
class Loop(Lite):
    def run(self):
        net = network()
        model, optimizer = self.setup(
            net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        )
        for _ in range(2):
            for inputs, targets in self.join_uneven_inputs(iter(own)):
                optimizer.zero_grad()
                self.backward(mse_loss(model(inputs), targets))
                optimizer.step()
        return net.state_dict()


weights["lite"] = Loop("cpu", "ddp", devices=2).run()
weights["lite, sharded"] = Loop("cpu", "ddp_sharded", devices=2).run()
torch.save(weights, f"weights{rank}.pt")
Path(f"out{rank}.json").write_text(json.dumps(out))
"""
)

common: dict[str, Any] = {}
exec(COMMON, common)


class Results:
    """What the two ranks found; they agree about errors and counts."""

    def __init__(self, folder: Path) -> None:
        first, second = (json.loads((folder / f"out{rank}.json").read_text()) for rank in (0, 1))
        assert first == second
        self.out: dict[str, Any] = first
        self.weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("uneven")
    (folder / "script.py").write_text(SCRIPT)
    run_file(folder / "script.py", folder=folder)
    return Results(folder)


REMEDY = (
    "let every rank's data have as many batches, or train on with those that have some by "
    "DDPStrategy(join_uneven_inputs=True)"
)


def test_lengths_that_differ_are_refused_before_training(results: Results) -> None:
    assert results.out["known"] == (
        "UserCodeError: the training data loader has different numbers of batches on the ranks "
        "(rank 0: 5, rank 1: 7), and every optimizer step needs one from each: pass "
        f"limit_train_batches=5, or {REMEDY}"
    )


@pytest.mark.parametrize(
    ("case", "ended", "limit"),
    [
        ("unknown", 5, 5),
        ("unknown, two to a step", 5, 5),
        ("nothing on rank 0", 0, 0),
        ("a limit that one does not reach", 5, 5),
    ],
)
def test_data_without_length_end_in_an_error_that_names_the_rank(
    results: Results, case: str, ended: int, limit: int
) -> None:
    hint = f"pass limit_train_batches={limit}, or " if limit else ""
    assert results.out[case] == (
        "UserCodeError: the training data loader has different numbers of batches on the ranks: "
        f"rank 0 ended after {ended} batch(es), and others had more, while every optimizer step "
        f"needs one from each: {hint}{REMEDY}"
    )


def test_a_limit_that_all_ranks_reach_makes_them_even(results: Results) -> None:
    assert results.out["limited"] == "trained"


def test_no_batch_on_any_rank_is_an_error(results: Results) -> None:
    assert results.out["nothing"] == (
        "UserCodeError: the training data loader yielded no batch; expected at least one in each "
        "epoch: a generator can be read only once, so pass a DataLoader or a list"
    )


def test_agreeing_before_each_step_changes_no_number(results: Results) -> None:
    for weights in results.weights:
        for name, value in weights["with length"].items():
            assert torch.equal(value, weights["without length"][name]), name


@pytest.mark.slow
def test_a_stream_that_is_not_divided_is_noticed(run_script: RunScript) -> None:
    script = """
lite = Lite("cpu", "ddp", devices=2)
lite.launch()
for own in (batches(0, 4), batches(lite.global_rank, 4)):
    lite.barrier()
    Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ).fit(Net(), DataLoader(Stream(own), batch_size=None))
"""
    finished = run_script(COMMON + script)
    hint = (
        "stratagem: the training data loader yielded the same first batch on all 2 ranks. Data "
        "without an index are not divided over ranks: let the dataset yield the part (index, "
        "count) that ranks.data_split of the Trainer or Lite names"
    )
    assert finished.stderr.count(hint) == 1, finished.stderr


def test_manual_optimization_is_not_joined(results: Results) -> None:
    assert results.out["manual"] == (
        "ConfigurationError: Manual has automatic_optimization = False, so the Trainer cannot "
        "weight its gradients as join_uneven_inputs=True needs: give every rank as many batches"
    )


def reference(accumulate: int = 1) -> dict[str, Any]:
    """Two epochs in this process: each batch is the mean over the ranks that have one."""
    net = common["network"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ranks = [common["batches"](rank, count) for rank, count in enumerate(common["LENGTHS"])]
    for _ in range(2):
        for first in range(0, 7, accumulate):
            positions = range(first, min(first + accumulate, 7))
            for position in positions:
                there = [items[position] for items in ranks if position < len(items)]
                for inputs, targets in there:
                    loss = common["mse_loss"](net(inputs), targets)
                    (loss / len(there) / len(positions)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "way", ["known", "unknown", "sharded", "accumulated", "resumed", "lite", "lite, sharded"]
)
def test_joined_ranks_average_over_ranks_with_a_batch(results: Results, way: str) -> None:
    expected = reference(accumulate=2 if way == "accumulated" else 1)
    for weights in results.weights:
        for name, value in weights[way].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


def test_a_batch_that_is_repeated_is_not_counted(results: Results) -> None:
    for way, steps in (("known", 14), ("unknown", 14), ("sharded", 14), ("accumulated", 8)):
        assert results.out[f"{way} logged"] == {"batches": 12.0}
        assert results.out[f"{way} steps"] == steps
    assert results.out["seen"] == [14, 14]


def test_a_length_that_is_not_kept_ends_all_ranks(run_script: RunScript) -> None:
    finished = run_script(
        COMMON
        + """
made = trainer("ddp")
own = batches(0, 7)
made.fit(Net(), own if made.global_rank == 0 else Promises(own[:5]))
""",
        expect=None,
    )
    assert finished.returncode != 0
    assert (
        "UserCodeError: the training data loader yielded 5 batches on this rank, but its length "
        "promised 7, and the other ranks would wait for the rest: let __len__ return what __iter__ "
        "yields, or leave __len__ out, so that ranks agree before each step"
    ) in finished.stderr


# ---------------------------------------------------------------- one process


def test_one_rank_joins_nothing() -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    assert list(lite.join_uneven_inputs(iter(range(3)))) == [0, 1, 2]


def test_a_rank_that_never_had_a_batch_cannot_be_joined(run_script: RunScript) -> None:
    finished = run_script(
        COMMON
        + """
made = trainer(DDPStrategy(join_uneven_inputs=True))
made.fit(Net(), DataLoader(Stream(batches(0, 3 * made.global_rank)), batch_size=None))
""",
        expect=None,
    )
    assert finished.returncode != 0
    assert (
        "UserCodeError: the training data loader yielded no batch on rank 0; expected at least one "
        "on each, since the last one is repeated while other ranks have more"
    ) in finished.stderr
