"""ddp_sharded: the numbers of ddp, a part of the state a rank, and checkpoints of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem.errors import ConfigurationError
from stratagem.strategies import DDPShardedStrategy

SCRIPTS = Path(__file__).parents[1] / "scripts"

# What the script and the reference runs in this process share.
COMMON = (SCRIPTS / "ddp_sharded_common.py").read_text()

SCRIPT = (
    COMMON
    + """
out, weights = {}, {}


class Own(torch.optim.SGD):
    # A user's optimizer, whose constructor takes other arguments than its defaults name.
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


def distance(some, others):
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(some, others))


def bytes_of_state(trainer):
    return sum(
        value.numel() * value.element_size()
        for entry in trainer.optimizers[0].optim.state.values()
        for value in entry.values()
    )


# -- 20 steps like ddp
for name, make in (("AdamW", torch.optim.AdamW), ("Own", Own)):
    expected, _ = fit("ddp", 2, 4, make)
    for view in (False, True):
        net, trainer = fit(DDPShardedStrategy(parameters_as_bucket_view=view), 2, 4, make)
        out[f"{name}, {view}"] = [
            distance(net.parameters(), expected.parameters()),
            trainer.global_step,
            trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
            [group["lr"] for group in trainer.optimizers[0].param_groups],
        ]
    if name == "AdamW":
        out["bytes"] = trainer.strategy.ranks.gather_objects(bytes_of_state(trainer))
        out["source holds"] = len(trainer.optimizers[0].source.state)

# -- checkpoints from and to other strategies
_, trainer = fit("ddp_sharded", 2, 2)
trainer.save_checkpoint("sharded.ckpt")
for strategy in ("ddp", "ddp_sharded"):
    for source in ("sharded", "single"):
        net, trainer = fit(strategy, 2, 4, ckpt_path=f"{source}.ckpt")
        weights[f"{source} to {strategy}"] = net.net.state_dict()
_, trainer = fit("ddp_sharded", 2, 2, ckpt_path="single.ckpt")
trainer.save_checkpoint("resaved.ckpt")


# -- Lite: a scheduler made before setup, another after it; an optimizer that stepped before
class Loop(Lite):
    def run(self, strategy_of_state):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        before = StepLR(optimizer, 3, 0.5)
        net(inputs).square().mean().backward()
        optimizer.step()
        model, optimizer = self.setup(net, optimizer)
        after = LambdaLR(optimizer, lambda step: 0.9 ** step)
        for batch in self.setup_dataloaders(DataLoader(data, batch_size=4)):
            optimizer.zero_grad()
            self.backward(mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            before.step()
            after.step()
        self.save("lite.ckpt", {"optimizer": optimizer})
        rate = optimizer.param_groups[0]["lr"]
        loaded = self.load("lite.ckpt")["optimizer"]
        optimizer.load_state_dict(loaded)
        before.step()
        return [p.detach() for p in net.parameters()], rate, optimizer.param_groups[0]["lr"], loaded

    def later(self):
        net = nn.Linear(5, 1)
        model = self.setup(net)
        optimizer = self.setup_optimizers(torch.optim.Adam(model.parameters()))
        self.backward(model(inputs).sum())
        optimizer.step()
        return len(optimizer.optimizer.optim.state)


results = {}
for strategy in ("ddp", "ddp_sharded"):
    lite = Loop(accelerator="cpu", strategy=strategy, devices=2)
    results[strategy] = lite.run(strategy)
(a, *rates, one), (b, *other_rates, two) = results.values()
out["lite"] = distance(a, b)
out["rates"] = [rates, other_rates]
out["lite state"] = max(
    float((one["state"][name][key] - two["state"][name][key]).abs().max())
    for name in one["state"] for key in one["state"][name]
)
out["set up later"] = lite.strategy.ranks.gather_objects(lite.later())

torch.save(weights, f"weights{trainer.global_rank}.pt")
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
"""
)

common: dict[str, Any] = {}
exec(COMMON, common)
fit = common["fit"]


class Results:
    """What the two ranks wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out, other = (json.loads((folder / f"out{rank}.json").read_text()) for rank in (0, 1))
        assert self.out == other
        self.weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("sharded")
    _, trainer = fit("single_device", 1, 2)
    trainer.save_checkpoint(folder / "single.ckpt")
    (folder / "script.py").write_text(SCRIPT)
    run_file(folder / "script.py", folder=folder)
    return Results(folder)


@pytest.mark.parametrize("optimizer", ["AdamW", "Own"])
@pytest.mark.parametrize("view", [False, True])
def test_ddp_sharded_trains_twenty_steps_like_ddp(
    results: Results, optimizer: str, view: bool
) -> None:
    distance, steps, of_scheduler, of_optimizer = results.out[f"{optimizer}, {view}"]
    assert distance < 1e-6
    assert steps == 20
    assert of_scheduler == of_optimizer == pytest.approx([0.03 / 2**10, 0.01 / 2**10])


def test_each_rank_holds_its_part_of_the_state(results: Results) -> None:
    parameters = 5 * 16 + 16 + 16 + 1
    on_one_device = 2 * 4 * parameters + 4 * 4  # two moments, and a counter for each of four
    assert sum(results.out["bytes"]) == on_one_device
    assert max(results.out["bytes"]) < 0.75 * on_one_device
    assert results.out["source holds"] == 0


@pytest.mark.parametrize("source", ["sharded", "single"])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
def test_a_run_resumes_under_another_strategy(results: Results, source: str, strategy: str) -> None:
    expected, _ = fit("single_device", 1, 4)
    for weights in results.weights:
        for name, value in weights[f"{source} to {strategy}"].items():
            torch.testing.assert_close(value, expected.net.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpoint", ["sharded", "resaved"])
def test_a_sharded_checkpoint_resumes_on_one_device(results: Results, checkpoint: str) -> None:
    expected, _ = fit("single_device", 1, 4)
    resumed, _ = fit("single_device", 1, 4, ckpt_path=results.folder / f"{checkpoint}.ckpt")
    assert resumed.losses == pytest.approx(expected.losses[10:], abs=1e-6)


def test_schedulers_made_before_and_after_setup_steer_the_optimizer(results: Results) -> None:
    assert results.out["lite"] < 1e-6
    assert results.out["lite state"] < 1e-6
    ddp, sharded = results.out["rates"]
    assert sharded == pytest.approx(ddp)


def test_an_optimizer_that_is_set_up_after_its_model_is_sharded_too(results: Results) -> None:
    assert results.out["set up later"] == [1, 1]


def test_lbfgs_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError) as caught:
        DDPShardedStrategy().shard(torch.optim.LBFGS([weight]))
    assert str(caught.value) == (
        "strategy='ddp_sharded' steps each parameter on one rank, and LBFGS needs all of them "
        "together: use strategy='ddp'"
    )


def test_parameters_of_several_number_formats_are_refused() -> None:
    mixed = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())]
    with pytest.raises(ConfigurationError) as caught:
        DDPShardedStrategy().shard(torch.optim.SGD(mixed, lr=0.1))
    assert str(caught.value) == (
        "strategy='ddp_sharded' expected the parameters of an optimizer in one dtype, "
        "received torch.float32, torch.float64: make an optimizer for each, or use strategy='ddp'"
    )


def test_one_rank_holds_all_of_the_state(tmp_path: Path) -> None:
    run_alone = (
        COMMON
        + """
expected, _ = fit("ddp", 1, 2)
net, trainer = fit("ddp_sharded", 1, 2)
assert net.losses == expected.losses
trainer.save_checkpoint("alone.ckpt")
resumed, _ = fit("single_device", 1, 3, ckpt_path="alone.ckpt")
expected, _ = fit("single_device", 1, 3)
assert resumed.losses == expected.losses[10:]
"""
    )
    (tmp_path / "script.py").write_text(run_alone)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=90)
