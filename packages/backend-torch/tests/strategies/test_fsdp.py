"""fsdp in real processes: the numbers of one process, half the state on each of two ranks."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.accelerators import DeviceAccelerator
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.environments import PlainEnvironment
from stratagem.errors import ConfigurationError
from stratagem.interfaces.components import Components
from stratagem.precision import TruePrecision
from stratagem.strategies import FSDPStrategy, apply_activation_checkpointing
from stratagem_torch.distributed import allocator
from stratagem_torch.sharding.shard_model import give_values
from stratagem_torch.sharding.wrap_policy import find_groups
from stratagem_torch.strategies.fsdp import TAKES_UNUSED_PARAMETERS

HERE = Path(__file__).parents[1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = load(HERE / "fsdp_models.py")

Ranks = list[dict[str, Any]]


def launch(name: str, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Ranks:
    """Run a script of this folder, which starts its ranks; return what each of them wrote."""
    run_file(HERE / name, *arguments, folder=folder, env=env)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("out*.json"))]


def close(values: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    return torch.allclose(torch.tensor(values), torch.tensor(expected), rtol=0, atol=tolerance)


# ---------------------------------------------------------------- the numbers


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process, with a second fit and a resumed one."""
    folder = tmp_path_factory.mktemp("numbers")
    runs, module = models.train("single_device")
    found = {
        "folder": folder,
        "losses": list(module.losses),
        "val_loss": float(runs.callback_metrics["val_loss"]),
        "again": runs.validate(module, models.loader(1), verbose=False)[0]["val_loss"],
        "predicted": torch.cat(runs.predict(module, models.loader(1))).flatten().tolist(),
    }
    runs.save_checkpoint(folder / "single_device.ckpt")
    module.losses.clear()
    runs.options = replace(runs.options, max_steps=25)
    runs.fit(module, models.loader(1))
    found["second fit"] = module.losses
    later = models.Net()
    models.trainer("single_device", 1, max_steps=25).fit(
        later, models.loader(1), ckpt_path=folder / "single_device.ckpt"
    )
    found["resumed"] = later.losses
    return found


@pytest.fixture(scope="module")
def numbers(reference: dict[str, Any]) -> Ranks:
    return launch("fsdp_numbers.py", reference["folder"])


WAYS = ("ddp", "fsdp", "blocks", "grad_op", "no_shard", "hybrid", "offload", "whole")


@pytest.mark.parametrize("way", WAYS)
def test_losses_equal_one_process(way: str, numbers: Ranks, reference: dict[str, Any]) -> None:
    # 20 steps with accumulation, clipping, two parameter groups and a scheduler.
    assert len(reference["losses"]) == 2 * models.STEPS
    assert close(numbers[0]["losses"][way], reference["losses"])
    assert numbers[0]["val_loss"][way] == pytest.approx(reference["val_loss"], abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_holds_its_part_of_parameters_and_optimizer_state(
    way: str, numbers: Ranks
) -> None:
    for kind in (0, 1):  # parameters, first moments
        whole = numbers[0]["held"]["ddp"][kind]
        held = [rank["held"][way][kind] for rank in numbers]
        if way in ("ddp", "no_shard"):
            assert held == [whole, whole]
        else:
            # The parameter without a dimension is on both.
            assert sum(held) == whole + 1
            assert max(held) < 0.55 * whole


def test_fsdp_evaluates_and_predicts_like_one_process(
    numbers: Ranks, reference: dict[str, Any]
) -> None:
    batches = [torch.tensor(rank["predicted"]).view(-1, 4) for rank in numbers]
    # Every second sample is a rank's.
    together = torch.stack([part.flatten() for part in batches], 1).flatten()
    assert close(together.tolist(), reference["predicted"])
    assert numbers[0]["again"] == pytest.approx(reference["again"], abs=1e-5)


def test_an_evaluation_reads_each_sample_once(tmp_path: Path) -> None:
    """Rank 0 has a batch more of eleven samples, and of nine."""
    run_file(HERE / "scripts" / "uneven_evaluation.py", folder=tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, found in enumerate(ranks):
        for samples, (mean, count, predicted) in zip((11, 9), found, strict=True):
            assert (mean, count) == ((samples - 1) / 2, samples)
            assert list(chain(*predicted)) == [*range(rank, samples, 2)]


def test_a_second_fit_goes_on_with_the_shards(numbers: Ranks, reference: dict[str, Any]) -> None:
    assert close(numbers[0]["second fit"], reference["second fit"])


@pytest.mark.parametrize("name", ["from single_device", "from ddp", "ddp from blocks"])
def test_a_checkpoint_of_one_strategy_resumes_under_another(
    name: str, numbers: Ranks, reference: dict[str, Any]
) -> None:
    assert close(numbers[0]["losses"][name], reference["resumed"], 1e-6)


def test_a_checkpoint_of_fsdp_resumes_on_one_device(
    numbers: Ranks, reference: dict[str, Any]
) -> None:
    for way in ("blocks", "no_shard", "offload"):
        resumed = models.Net(seed=5)
        models.trainer("single_device", 1, max_steps=25).fit(
            resumed, models.loader(1), ckpt_path=reference["folder"] / f"{way}.ckpt"
        )
        assert close(resumed.losses, reference["resumed"], 1e-6)


# ---------------------------------------------------------------- what else it does


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("behaviour")
    ranks = launch("fsdp_behaviour.py", folder)
    for index, rank in enumerate(ranks):
        rank["weights"] = torch.load(folder / f"weights{index}.pt")
    return ranks


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, *schedulers: Any) -> list[float]:
    inputs, targets = models.data(48).tensors
    losses = []
    for start in range(0, 48, 8):
        loss = mse_loss(net(inputs[start : start + 8]), targets[start : start + 8])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adam", functools.partial(torch.optim.Adam, lr=1e-2)),
        ("fused", functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
        ("foreach", functools.partial(torch.optim.Adam, lr=1e-2, foreach=True)),
        ("sgd", functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    ],
)
def test_an_optimizer_that_stepped_before_sharding_goes_on(
    name: str, kind: Callable[[Any], torch.optim.Optimizer], behaviour: Ranks
) -> None:
    net = models.mlp()
    optimizer = kind(
        [{"params": net[0].parameters(), "lr": 2e-2}, {"params": net[1:].parameters()}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    models.early(net, optimizer)
    assert close(behaviour[0][name], steps(net, optimizer, scheduler))
    assert behaviour[0][f"{name} rates"] == [group["lr"] for group in optimizer.param_groups]
    assert behaviour[0][f"{name} sharded"]


def test_state_is_whole_has_canonical_names_and_does_not_follow_training(
    behaviour: Ranks,
) -> None:
    names = list(models.mlp().state_dict())
    assert behaviour[0]["keys"] == [names, names]
    assert behaviour[0]["saved stays"]
    assert behaviour[0]["repeated"]


def test_an_evaluation_before_the_step_leaves_no_stale_parameters(behaviour: Ranks) -> None:
    torch.manual_seed(0)
    net = models.mlp()
    x, y = models.data(8).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.autograd.backward(mse_loss(net(x), y))
    optimizer.step()
    assert close(behaviour[0]["after step"], net(x).flatten().tolist())


def test_a_method_that_was_marked_runs_with_whole_parameters(behaviour: Ranks) -> None:
    x, _ = models.data(8).tensors
    expected = models.mlp()(x).sum().item()
    assert behaviour[0]["score gradient"] == pytest.approx(expected, abs=1e-5)


def test_fsdp_broadcasts_the_initial_weights_of_rank_0(
    behaviour: Ranks,
) -> None:
    got, expected = (behaviour[0]["weights"][name] for name in ("seeds", "seed 10"))
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert behaviour[1]["weights"]["seeds"] == {}


@pytest.mark.parametrize("way", ["kept", "checkpointed"])
def test_batch_norm_has_the_statistics_of_ddp(way: str, behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank[f"norm {way}"] == pytest.approx(rank["norm ddp"], abs=1e-5)
        for got, expected in zip(
            rank[f"norm {way} buffers"], behaviour[0]["norm ddp buffers"], strict=True
        ):
            assert close(got, expected)


def test_tied_weights_stay_tied(behaviour: Ranks) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
            self.layers[1].weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x).sum(1, keepdim=True)

    net = Tied()
    assert close(behaviour[0]["tied"], steps(net, torch.optim.Adam(net.parameters(), lr=1e-2)))
    assert behaviour[0]["still tied"]
    assert behaviour[0]["tied on meta"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bf16-mixed", "torch.float32"),
        ("bf16-true", "torch.bfloat16"),
        ("policy", "torch.float32"),
        ("own policy", "torch.float32"),
    ],
)
def test_fsdp_precision_sets_the_dtypes(name: str, parameters: str, behaviour: Ranks) -> None:
    losses, activations, held = behaviour[0][name]
    net = models.mlp()
    expected = steps(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0.05)
    assert not close(losses, expected)
    assert held == parameters
    assert activations == "torch.bfloat16"


def test_compiled_layers_train_alike(behaviour: Ranks) -> None:
    assert close(behaviour[0]["compiled"], behaviour[0]["not compiled"])


def test_parameters_that_one_rank_uses_get_the_mean_gradient(behaviour: Ranks) -> None:
    if not TAKES_UNUSED_PARAMETERS:
        with pytest.raises(ConfigurationError, match=r"needs a newer torch.*2\.13 has it"):
            FSDPStrategy(find_unused_parameters=True)
        return
    for rank in behaviour:
        assert rank["branches"] == [[0.5] * 3, [0.5] * 5, 1.5]


def test_gradients_of_parameters_without_a_dimension_are_averaged_in_their_dtype(
    behaviour: Ranks,
) -> None:
    for rank in behaviour:
        double, complex_ = rank["scalars alone"]
        assert rank["scalars"][0] == pytest.approx(double, rel=1e-15)
        assert rank["scalars"][1] == pytest.approx(complex_, rel=1e-6)


def test_nested_no_backward_sync_keeps_the_outer_one(behaviour: Ranks) -> None:
    assert all(rank["held"][0] for rank in behaviour)
    assert behaviour[0]["held"][1] != behaviour[1]["held"][1]


def test_clipping_is_by_the_norm_over_all_ranks(behaviour: Ranks) -> None:
    net = models.Network(seed=9)
    x, y = models.data(8).tensors
    torch.autograd.backward(mse_loss(net(x), y))
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    expected = [nn.utils.get_total_norm(gradients, kind).item() for kind in (2.0, torch.inf)]
    for rank in behaviour:
        assert close(rank["norms"], expected)
        assert rank["clipped"] == pytest.approx(0.1, abs=1e-4)
        assert rank["largest"] <= 0.01 + 1e-7


def test_a_model_on_the_meta_device_gets_the_numbers_of_a_plain_build(behaviour: Ranks) -> None:
    got, expected = (behaviour[0]["weights"][name] for name in ("meta", "not meta"))
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "nan",
            "RuntimeError: the norm of order 2.0 of the gradients is nan, so it cannot be clipped",
        ),
        (
            "gone",
            "UserCodeError: Net.configure_optimizers() returned a Adam that holds 20 of 20 "
            "parameters that the model does not have (any more), so its steps would not train",
        ),
        ("partly gone", "ConfigurationError: the SGD holds 1 of 3 parameters that the model does"),
        (
            "tied",
            "ConfigurationError: the parameters layers.0.weight and layers.1.weight are one "
            "tensor, but auto_wrap_policy=<class 'torch.nn.modules.linear.Linear'> puts them into "
            "different groups",
        ),
        (
            "none chosen",
            "UserWarning: auto_wrap_policy=<class 'torch.nn.modules.conv.Conv2d'> chooses none of "
            "the model's modules, so that all of its parameters are gathered at once; the model "
            "has Block, Linear, Sequential",
        ),
        (
            "none checkpointed",
            "UserWarning: activation_checkpointing=<class 'torch.nn.modules.conv.Conv2d'> chooses "
            "none of the model's modules, so that it does nothing; the model has Block, Linear",
        ),
        (
            "rebuilt",
            "UserCodeError: the model was sharded before, and has a new parameter 'net.shift' "
            "since: expected the same parameters. configure_model() is called before each run",
        ),
        (
            "helpless",
            "UserCodeError: the module '0' (Network) is on the meta device and has no method "
            "reset_parameters()",
        ),
        (
            "mixed",
            "ConfigurationError: the Adam was made with fused=True, which steps all parameters of "
            "a group at once; 2 of them cannot be sharded",
        ),
        (
            "hooked",
            "ConfigurationError: the parameter '0.weight' has a hook, which would not be called: a "
            "shard takes the parameter's place. Change gradients in on_before_optimizer_step",
        ),
        (
            "differing",
            "UserCodeError: ranks have gradients of different parameters in one backward (rank 0: "
            "'one'; rank 1: 'other'): expected every rank to use the same ones. Pass FSDPStrategy("
            "find_unused_parameters=True)",
        ),
        (
            "experts",
            "UserCodeError: ranks have gradients of different parameters in one backward (rank 0: "
            "'experts.0.weight', 'experts.0.bias'; rank 1: 'experts.1.weight', 'experts.1.bias')",
        ),
        (
            "experts whole",
            "UserCodeError: ranks have gradients of different parameters in one backward (rank 0: "
            "'experts.0.weight', 'experts.0.bias'; rank 1: 'experts.1.weight', 'experts.1.bias')",
        ),
        (
            "experts as groups",
            "UserCodeError: ranks have gradients of different parameters in one backward (rank 0: "
            "'experts.0.weight', 'experts.0.bias'; rank 1: 'experts.1.weight', 'experts.1.bias')",
        ),
        (
            "weights",
            "CheckpointMismatchError: the checkpoint belongs to another model: these have another "
            "shape: 0.weight (3, 3) (the model has (8, 5))",
        ),
    ],
)
def test_fsdp_refuses_bad_settings_on_every_rank(
    name: str, expected: str, behaviour: Ranks
) -> None:
    for rank in behaviour:
        assert rank["messages"][name].startswith(expected)


def test_fsdp_keeps_user_attributes_of_parameters(behaviour: Ranks) -> None:
    assert [rank["attribute"] for rank in behaviour] == [0.5, 0.5]


# ---------------------------------------------------------------- building and memory


def test_a_model_is_built_in_pieces_with_the_numbers_of_a_plain_build(tmp_path: Path) -> None:
    ranks = launch("fsdp_build.py", tmp_path, "1024", "12")
    assert ranks[0]["differ"] == []
    assert ranks[0]["names"]
    assert ranks[1]["own numbers"]
    for rank in ranks:
        assert rank["finite"]
        assert rank["total"] > 380
        # Half of it, and what is whole at a time.
        assert rank["peak"] < 0.85 * rank["total"]


@pytest.mark.long
def test_fsdp_rank_needs_half_the_memory_of_ddp() -> None:
    script = load(HERE.parents[2] / "benchmarks" / "memory.py")
    ddp, fsdp = (script.measure(way, 12, 768, 1) for way in ("ddp", "fsdp"))
    assert ddp["parameters"] == pytest.approx(56.7e6, rel=1e-3)
    # Of libraries, a torch with CUDA has 300 MB more than one without.
    own = [figures["peak"] - figures["libraries"] for figures in (ddp, fsdp)]
    assert own[1] <= 0.48 * own[0]


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1"}],
)
def test_an_allocator_that_the_user_has_set_is_left_alone(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert allocator.return_freed_memory.__wrapped__() is False


def test_huge_pages_are_enabled_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(allocator.HUGE_PAGES_VARIABLE, raising=False)
    allocator.use_huge_pages()
    assert os.environ[allocator.HUGE_PAGES_VARIABLE] == "1"
    monkeypatch.setenv(allocator.HUGE_PAGES_VARIABLE, "0")
    allocator.use_huge_pages()
    assert os.environ[allocator.HUGE_PAGES_VARIABLE] == "0"


# ---------------------------------------------------------------- options, before processes start


def request(devices: int = 2, precision: Any = "32-true", **options: Any) -> Lite:
    return Lite("cpu", strategy=FSDPStrategy(**options), devices=devices, precision=precision)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"sharding_strategy": "FULL"},
            "sharding_strategy='FULL': expected one of 'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD', "
            "'HYBRID_SHARD'",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD", "devices": 1},
            "sharding_strategy='HYBRID_SHARD' replicates groups of ranks that shard, so it needs "
            "several ranks, received 1",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
            "device_mesh=(2, 2) is for 2 x 2 = 4 ranks, received 2: expected (replicas, shards) "
            "whose product is the number of ranks",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2,)},
            "device_mesh=(2,): expected (replicas, shards), two numbers of ranks",
        ),
        (
            {"device_mesh": (1, 2)},
            "device_mesh=(1, 2) is for sharding_strategy='HYBRID_SHARD', received "
            "sharding_strategy='FULL_SHARD'",
        ),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16': expected a floating-point dtype"),
        (
            {"mixed_precision": torch.bfloat16, "precision": "bf16-mixed"},
            "was passed to the strategy and precision='bf16-mixed' as well: give one of the two",
        ),
        (
            {"activation_checkpointing": 3},
            "activation_checkpointing=3: expected True, names of modules",
        ),
        ({"auto_wrap_policy": "Block"}, "auto_wrap_policy='Block': expected a class of modules"),
        ({"auto_wrap_policy": 0}, "auto_wrap_policy=0: expected a class of modules"),
        (
            {"backward_prefetch": "PRE"},
            "backward_prefetch='PRE': expected one of 'BACKWARD_PRE', 'BACKWARD_POST'",
        ),
        (
            {"limit_all_gathers": False},
            "limit_all_gathers=False: FSDP2 never gathers further ahead than the next group",
        ),
        (
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
            "sharding_strategy='SHARD_GRAD_OP' keeps parameters whole after forward, received "
            "reshard_after_forward=True",
        ),
        ({"reshard_after_forward": 1}, "reshard_after_forward=1: expected True, False, None, or"),
        (
            {"cpu_offload": CPUOffload(offload_params=False)},
            "cpu_offload=CPUOffload(offload_params=False): expected True, False, or a "
            "torch.distributed.fsdp.OffloadPolicy",
        ),
    ],
)
def test_a_wrong_option_is_refused_before_processes_start(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        request(**options)
    assert expected in str(caught.value)


def test_options_may_be_given_as_fsdp1_takes_them() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    strategy = FSDPStrategy(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # type: ignore[arg-type]
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,  # type: ignore[arg-type]
    )
    assert strategy.sharding_strategy == "SHARD_GRAD_OP"
    assert strategy.backward_prefetch == "BACKWARD_POST"


def test_a_dtype_stands_for_a_policy_that_reduces_in_float32() -> None:
    assert FSDPStrategy(mixed_precision=torch.bfloat16).mixed_precision == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("name", "sharding", "offload"),
    [
        ("fsdp", "FULL_SHARD", None),
        ("fsdp_cpu_offload", "FULL_SHARD", True),
        ("fsdp_shard_grad_op", "SHARD_GRAD_OP", None),
        ("fsdp_no_shard", "NO_SHARD", None),
        ("fsdp_hybrid_shard", "HYBRID_SHARD", None),
    ],
)
def test_each_preset_has_a_name(name: str, sharding: str, offload: bool | None) -> None:
    strategy = Lite("cpu", strategy=name, devices=2).strategy
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.sharding_strategy == sharding
    assert strategy.cpu_offload is offload


# ---------------------------------------------------------------- groups and checkpointing


def names(groups: list[nn.Module], root: nn.Module) -> list[str]:
    found = {part: name for name, part in root.named_modules()}
    return [found[group] for group in groups]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (nn.Linear, ["0", "1.up", "1.down", "2"]),
        ({nn.Sequential, nn.Linear}, ["0", "1.up", "1.down", "2"]),
        (100, ["1"]),
        (lambda part: isinstance(part, nn.Linear) and part.in_features == 16, ["1.down"]),
        (ModuleWrapPolicy({nn.Linear}), ["0", "1.up", "1.down", "2"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=130), ["1.up", "1.down"]),
        (None, []),
    ],
)
def test_a_policy_chooses_the_groups(policy: Any, expected: list[str]) -> None:
    net = models.mlp()
    assert names(find_groups(net, policy), net) == expected


def test_by_default_large_elements_of_lists_are_groups() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2000, 1000)
            layers = [nn.TransformerEncoderLayer(512, 8, 512, device="meta") for _ in range(2)]
            self.layers = nn.ModuleList(layers)
            self.last = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Linear(2, 2))

    net = Large()
    assert names(find_groups(net, None), net) == ["layers.0", "layers.1", "last.0"]
    net.last[0].weight = net.table.weight
    assert names(find_groups(net, None), net) == ["layers.0", "layers.1"]


def test_checkpointing_computes_again_with_the_same_random_numbers_and_counts_once() -> None:
    calls = []

    class Layer(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> Any:
            calls.append(1)
            self.seen += 1
            return nn.functional.dropout(self.norm(self.linear(x)), 0.3)

    results = []
    for choice in (None, True, nn.BatchNorm1d, lambda part: isinstance(part, Layer)):
        torch.manual_seed(0)
        calls.clear()
        net = nn.Sequential(nn.Sequential(Layer(), Layer()))
        names_before = list(net.state_dict())
        chosen = apply_activation_checkpointing(net, choice)
        x = net(torch.randn(8, 4))
        torch.autograd.backward(x.square().sum())
        results.append([*net.state_dict().values(), *(p.grad for p in net.parameters())])
        assert list(net.state_dict()) == names_before
        assert len(chosen) == (0 if choice is None else 2)
        assert len(calls) == (2 if choice in (None, nn.BatchNorm1d) else 4)
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, expected)


# ---------------------------------------------------------------- other devices than the host


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_shards_in_host_memory_are_communicated_by_gloo(backend: str) -> None:
    class GPU(DeviceAccelerator):
        name = "cuda"
        process_group_backend = backend

    strategy = FSDPStrategy(cpu_offload=True)
    strategy.bind(
        Components(
            accelerator=GPU(),
            precision=TruePrecision(),
            checkpoint_io=SingleFileCheckpointIO(),
            cluster_environment=PlainEnvironment(),
            devices=(0,),
        )
    )
    assert strategy.communication_backend == "cpu:gloo,cuda:nccl"


def test_tensors_that_only_a_modules_apply_moves_are_moved() -> None:
    class Metric(nn.Module):  # as torchmetrics' base class
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(())

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.total = fn(self.total)
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    metric = Metric()
    give_values(metric, torch.device("meta"), name="metric")
    assert metric.total.is_meta
