"""The engine's config, and what is refused before a process starts."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from stratagem import Lite, Trainer
from stratagem.errors import ConfigurationError
from stratagem.precision import EnginePrecision, Precision
from stratagem_deepspeed import library, op_builds, ops, preparation
from stratagem_deepspeed.config import Facts, engine_config, why_not_followed
from stratagem_deepspeed.config_file import read_config
from stratagem_deepspeed.known_keys import KNOWN_KEYS
from stratagem_deepspeed.optimizers import check_elementwise, only_one, suited, use_torchs_adam
from stratagem_deepspeed.options import Options, documentation
from stratagem_deepspeed.plugin import stratagem_components
from stratagem_deepspeed.preparation import (
    build_ops,
    can_fuse_adam,
    check_elements,
    check_parameters,
)
from stratagem_deepspeed.strategy import DeepSpeedStrategy


def made(options: dict[str, Any] | None = None, user: Any = None, **facts: Any) -> dict[str, Any]:
    return engine_config(Options(**(options or {})), read_config(user), Facts(**facts))


def trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **options)


def endless() -> dict[str, Any]:
    """A config that holds itself."""
    config: dict[str, Any] = {}
    config["optimizer"] = {"params": config}
    return config


FILES = {
    '{"gradient_clipping": 1.0, "gradient_clipping": 2.0}': "has the key 'gradient_clipping' twice",
    '{"zero_optimization": {"stage": 1, "stage": 3}}': "has the key 'stage' twice in one section",
    '{"gradient_clipping": NaN}': "config: gradient_clipping=nan: expected a finite number",
    '{"gradient_clipping": 1e999}': "config: gradient_clipping=inf: expected a finite number",
    '{"fp16": {"loss_scale": -Infinity}}': "config: fp16.loss_scale=-inf: expected a finite number",
    '{"a":' * 20_000: "is nested more than 32 levels deep",
    '{"a":' * 40 + "1" + "}" * 40: "is nested more than 32 levels deep (below 'a.a.a')",
    "\x00": "is not JSON",
    "1" * 5000: "is not JSON",
    " " * (16 << 20) + "{}": "cannot be read (it is larger than 16 MB)",
}


@pytest.mark.parametrize("text", FILES, ids=[expected[:40] for expected in FILES.values()])
def test_a_file_that_json_or_deepspeed_would_take_wrongly_is_refused(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedStrategy(config=file)
    assert FILES[text] in str(caught.value)


def test_a_config_file_is_a_regular_file_in_utf_8(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigurationError) as caught:
            DeepSpeedStrategy(config=path)
        assert f"config={str(path)!r} cannot be read (it is no regular file)" in str(caught.value)
    (tmp_path / "config.json").write_bytes(b'{"wandb": {"team": "M\xc3\xbcnchen"}}')
    assert read_config(tmp_path / "config.json")["wandb"] == {"team": "München"}


# ---------------------------------------------------------------- what an engine is told


def test_clipping_is_always_written_since_deepspeeds_own_default_is_1() -> None:
    assert made()["gradient_clipping"] == 0.0
    assert made(clip=0.5)["gradient_clipping"] == 0.5
    assert made(user={"gradient_clipping": 1.0})["gradient_clipping"] == 1.0


def test_auto_values_are_filled_from_the_run() -> None:
    user = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
    }
    config = made(
        {"stage": 3},
        user,
        precision="bf16-mixed",
        clip=0.5,
        accumulation=4,
        loop="Trainer",
        batch_size=16,
        world_size=2,
    )
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["train_batch_size"] == 128
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["reduce_bucket_size"] == 200_000_000


def test_a_config_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert DeepSpeedStrategy(config=file).stage == 3
    assert DeepSpeedStrategy(config=str(file)).stage == 3


def test_the_documents_example_of_a_config_is_taken() -> None:
    config = {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_bucket_size": 2e8,
            "reduce_bucket_size": 2e8,
        },
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "fp16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    assert made(user=config, precision="16-mixed")["fp16"] == {"enabled": True}


def test_arguments_of_nvme_reach_their_sections() -> None:
    config = made(
        {
            "stage": 3,
            "offload_optimizer": True,
            "offload_optimizer_device": "nvme",
            "nvme_path": "/fast",
            "queue_depth": 16,
            "thread_count": 2,
        }
    )
    section = config["zero_optimization"]["offload_optimizer"]
    assert section == {"device": "nvme", "pin_memory": False, "nvme_path": "/fast"}
    assert config["aio"] == {"queue_depth": 16, "intra_op_parallelism": 2}


def test_known_keys_agree_with_the_installed_deepspeed() -> None:
    script = Path(__file__).parents[1] / "scripts" / "make_known_keys.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--check"],
        env={"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_option_is_a_keyword_argument_of_the_strategy_with_its_default() -> None:
    arguments = inspect.signature(DeepSpeedStrategy.__init__).parameters
    for option in fields(Options):
        argument = arguments[option.name]
        assert argument.kind is argument.KEYWORD_ONLY
        assert argument.default == option.default, option.name
    others = set(arguments) - {option.name for option in fields(Options)}
    own = {"self", "activation_checkpointing", "config", "save_full_weights", "components"}
    assert others == own


def test_the_strategy_documents_every_option_in_the_words_of_its_field() -> None:
    arguments = (inspect.getdoc(DeepSpeedStrategy) or "").partition("Args:\n")[2]
    entries = dict(re.findall(r"^    (\w[\w, \n]*?): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE))
    found = {" ".join(names.split()): " ".join(text.split()) for names, text in entries.items()}
    documented = {", ".join(names): text for names, text in documentation()}
    assert {names: found.get(names) for names in documented} == documented


def test_every_option_has_a_place_that_deepspeed_knows() -> None:
    for option in fields(Options):
        *section, key = option.metadata["path"] or ("zero_optimization", "stage")
        assert key in KNOWN_KEYS[tuple(section)], option.name


def test_the_presets_are_options() -> None:
    names = {option.name for option in fields(Options)}
    for spec in filter(lambda one: one.kind == "strategy", stratagem_components()):
        assert set(spec.init_args) <= names
        assert made(dict(spec.init_args))["zero_optimization"]["stage"] == spec.init_args.get(
            "stage", 2
        )


def test_default_buckets_on_the_cpu_are_small() -> None:
    small = made({"stage": 3}, device_type="cpu")["zero_optimization"]
    for name in (
        "allgather_bucket_size",
        "reduce_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ):
        assert small[name] == 10_000_000
    given = made(
        {"stage": 3, "reduce_bucket_size": 5},
        {"zero_optimization": {"max_live_parameters": 7, "sub_group_size": 8}},
        device_type="cpu",
    )["zero_optimization"]
    assert (given["reduce_bucket_size"], given["sub_group_size"]) == (5, 8)
    assert given["max_live_parameters"] == 7
    assert "stage3_max_live_parameters" not in given
    elsewhere = made({"stage": 3}, device_type="cuda")["zero_optimization"]
    assert elsewhere["reduce_bucket_size"] == 200_000_000
    assert "stage3_max_live_parameters" not in elsewhere


def test_optimizer_state_is_not_loaded_onto_nvme() -> None:
    strategy = DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_optimizer_device="nvme")
    with pytest.raises(ConfigurationError, match="resume under strategy='deepspeed_stage_3_off"):
        strategy.load_optimizer_state(None, None, {})  # type: ignore[arg-type]


def test_the_range_of_versions_is_the_one_that_the_distribution_requires() -> None:
    numbers = [".".join(map(str, version)) for version in (library.OLDEST, library.TOO_NEW)]
    (required,) = (
        r for r in metadata.requires("stratagem-backend-deepspeed") or () if "deepspeed" in r
    )
    assert sorted(required.removeprefix("deepspeed").split(",")) == sorted(
        [f">={numbers[0]}", f"<{numbers[1]}"]
    )


@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 1}}])
def test_offload_parameters_below_stage_3_warns(config: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"offload_parameters=True with stage=[12]: parameters are"
    ):
        strategy = DeepSpeedStrategy(
            offload_optimizer=True,
            offload_parameters=True,
            offload_params_device="cpu",
            config=config,
        )
    assert not strategy.options.offload_parameters
    assert strategy.options.offload_optimizer


# ---------------------------------------------------------------- bad input

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no such stage": (lambda: DeepSpeedStrategy(stage=4), "stage=4: expected 1"),
    "parameters below stage 3": (
        lambda: DeepSpeedStrategy(
            config={"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
        ),
        "needs stage=3, where they are sharded; received stage=2",
    ),
    "optimizer at stage 0": (
        lambda: DeepSpeedStrategy(stage=0, offload_optimizer=True),
        "needs stage=1, 2 or 3, received stage=0",
    ),
    "optimizer on nvme below stage 3": (
        lambda: DeepSpeedStrategy(offload_optimizer=True, offload_optimizer_device="nvme"),
        "to 'nvme' needs stage=3, received stage=2",
    ),
    "no such device": (
        lambda: DeepSpeedStrategy(offload_optimizer=True, offload_optimizer_device="disk"),
        "offload_optimizer_device='disk': expected 'cpu' or 'nvme'",
    ),
    "a stage twice": (
        lambda: DeepSpeedStrategy(stage=2, config={"zero_optimization": {"stage": 3}}),
        "config: zero_optimization.stage=3, but stage=2",
    ),
    "a file that is missing": (
        lambda: DeepSpeedStrategy(config="missing.json"),
        "config='missing.json' cannot be read",
    ),
    "a file that is not JSON": (
        lambda: DeepSpeedStrategy(config=__file__),
        "is not JSON",
    ),
    "no dict": (lambda: DeepSpeedStrategy(config=cast(Any, [1])), "config holds a list"),
    "a number that is none": (
        lambda: DeepSpeedStrategy(config={"gradient_clipping": float("nan")}),
        "config: gradient_clipping=nan: expected a finite number",
    ),
    "an infinite number in a list": (
        lambda: DeepSpeedStrategy(config={"optimizer": {"params": {"betas": [0.9, -math.inf]}}}),
        "config: optimizer.params.betas.1=-inf: expected a finite number",
    ),
    "an argument that is no number": (
        lambda: DeepSpeedStrategy(loss_scale=float("nan")),
        "loss_scale=nan: expected a finite number",
    ),
    "an infinite clip": (
        lambda: trainer("deepspeed", gradient_clip_val=math.inf),
        "gradient_clip_val=inf: expected a finite number",
    ),
    "a config without end": (
        lambda: DeepSpeedStrategy(config=endless()),
        "config is nested more than 32 levels deep (below 'optimizer.params.optimizer')",
    ),
    "an unknown key": (
        lambda: DeepSpeedStrategy(config={"gradient_cliping": 1.0}),
        "'gradient_cliping' is not a key of DeepSpeed's config; did you mean 'gradient_clipping'?",
    ),
    "an unknown key in a section": (
        lambda: DeepSpeedStrategy(config={"zero_optimization": {"stag": 1}}),
        "did you mean 'zero_optimization.stage'?",
    ),
    "no section": (
        lambda: DeepSpeedStrategy(config={"fp16": True}),
        "config: fp16=True: expected a section",
    ),
    "auto that nothing fills": (
        lambda: DeepSpeedStrategy(config={"scheduler": {"type": "auto"}}),
        "config: scheduler.type='auto' cannot be filled",
    ),
    "overlap below stage 2": (
        lambda: DeepSpeedStrategy(stage=1, overlap_comm=True),
        "overlap_comm=True with stage=1",
    ),
    "bf16 at stage 0": (
        lambda: trainer(DeepSpeedStrategy(stage=0), precision="bf16-mixed"),
        "precision='bf16-mixed' with stage=0: DeepSpeed takes a step with zero gradients",
    ),
    "another precision": (
        lambda: trainer(DeepSpeedStrategy(config={"bf16": {"enabled": True}})),
        "config: bf16.enabled=True, but precision='32-true'",
    ),
    "64-true": (
        lambda: trainer("deepspeed", precision="64-true"),
        "received precision='64-true'",
    ),
    "clipping twice": (
        lambda: trainer(
            DeepSpeedStrategy(config={"gradient_clipping": 1.0}), gradient_clip_val=0.5
        ),
        "config: gradient_clipping=1.0, but gradient_clip_val=0.5",
    ),
    "clipping by value": (
        lambda: trainer("deepspeed", gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        "gradient_clip_algorithm='value': DeepSpeed's engine clips by the Euclidean norm only",
    ),
    "accumulation twice": (
        lambda: trainer(DeepSpeedStrategy(config={"gradient_accumulation_steps": 4})),
        "config: gradient_accumulation_steps=4, but accumulate_grad_batches=1",
    ),
    "accumulation under Lite": (
        lambda: made(user={"gradient_accumulation_steps": 4}, loop="Lite", batch_size=0),
        "a loop under Lite accumulates itself",
    ),
    "a batch size that the loader does not say": (
        lambda: made(user={"train_micro_batch_size_per_gpu": "auto"}, loop="Trainer", batch_size=0),
        "train_micro_batch_size_per_gpu='auto' is filled from the training data loader, and this "
        "one has no batch_size",
    ),
    "a batch size twice": (
        lambda: made(user={"train_micro_batch_size_per_gpu": 4}, loop="Trainer", batch_size=8),
        "config: train_micro_batch_size_per_gpu=4, but the training data loader has batch_size=8",
    ),
    "a whole batch size that is none": (
        lambda: made(user={"train_batch_size": 9}, loop="Trainer", batch_size=2, world_size=2),
        "config: train_batch_size=9, but",
    ),
    "both on nvme in float32": (
        lambda: made(
            {
                "stage": 3,
                "offload_optimizer": True,
                "offload_parameters": True,
                "offload_optimizer_device": "nvme",
                "offload_params_device": "nvme",
            },
            precision="32-true",
        ),
        "fails inside DeepSpeed with float32 parameters",
    ),
    "an nvme path that cannot be written": (
        lambda: op_builds.check_nvme_path("/proc"),
        "nvme_path='/proc' cannot be written",
    ),
    "several optimizers": (
        lambda: only_one([sgd(), sgd()]),
        "steps one optimizer, received 2 (SGD, SGD)",
    ),
    "an optimizer of whole tensors": (
        lambda: check_elementwise(torch.optim.Adafactor([weights()]), made()),
        "torch.optim.Adafactor steps whole tensors",
    ),
    "an optimizer that is not known": (
        lambda: check_elementwise(Own([weights()], {}), made()),
        "is not known to treat each element by itself",
    ),
}


def weights() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 2))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([weights()], lr=0.1)


class Own(torch.optim.Optimizer):
    pass


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_its_reason(what: str) -> None:
    action, message = REFUSED[what]
    with pytest.raises(ConfigurationError) as caught:
        action()
    assert message in str(caught.value)


def test_clipping_by_hand_is_refused() -> None:
    lite = Lite(accelerator="cpu", strategy="deepspeed", devices=2)
    with pytest.raises(ConfigurationError, match="'deepspeed' clips gradients itself"):
        lite.clip_gradients(None, sgd(), max_norm=1.0)  # type: ignore[arg-type]


def test_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version_of", lambda name: "0.16.4")
    with pytest.raises(ConfigurationError, match=r"DeepSpeed 0\.16\.4 is installed; .*>=0\.19\.8"):
        DeepSpeedStrategy()


def test_missing_deepspeed_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "version_of", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"not installed.*pip install 'deepspeed>="):
        DeepSpeedStrategy()


def test_missing_compiler_is_refused_before_processes_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        trainer("deepspeed_stage_2_offload")
    assert "'no-such-compiler' was not found): apt-get install g++" in str(caught.value)
    assert "zero_force_ds_cpu_optimizer" in str(caught.value)


def test_a_lock_that_a_killed_build_left_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_builds, "_LOCK_IS_OLD", -1.0)
    (tmp_path / "lock").touch()
    op_builds._remove_old_lock(tmp_path)
    assert not (tmp_path / "lock").exists()
    assert "left over by a build that did not end" in capsys.readouterr().err


def test_doctor_lists_ops_and_missing_compilers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from stratagem_deepspeed.doctor import checks

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    first, *of_ops = checks()
    assert first.name.startswith("deepspeed 0.")
    has_cuda = torch.version.cuda is not None  # kernels for GPUs are of no use to other builds
    names = [name for name, op in ops.OPS.items() if has_cuda or not op.needs_nvcc]
    assert [check.name.split()[1] for check in of_ops] == names
    monkeypatch.setenv("CXX", "no-such-compiler")
    for check in list(checks())[1:]:
        assert check.status == "warning"
        assert "apt-get install g++" in check.detail


def test_doctor_looks_for_headers_and_starts_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{arguments} was started")

    monkeypatch.setattr("subprocess.run", refuse)
    monkeypatch.setattr(ops, "_INCLUDED", (str(tmp_path),))
    missing = "libaio.h is missing: apt-get install libaio-dev"
    assert missing in ops.what_is_missing("async_io")
    (tmp_path / "libaio.h").touch()
    assert "libaio.h" not in ops.what_is_missing("async_io")
    monkeypatch.setattr(ops, "_INCLUDED", ())
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert "libaio.h" not in ops.what_is_missing("async_io")


def test_ops_are_where_torch_builds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder and the versions in its mark are found without torch, and are torch's own."""
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert ops.folder_of("cpu_adam") == _get_build_directory("cpu_adam", verbose=False)
    assert f"-torch-{torch.__version__}-" in ops.mark_of("cpu_adam")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ops.folder_of("cpu_adam") == _get_build_directory("cpu_adam", verbose=False)


def test_config_that_contradicts_an_argument_is_refused() -> None:
    config = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    with pytest.raises(ConfigurationError, match=r"device='none', but offload_optimizer=True"):
        DeepSpeedStrategy(stage=2, offload_optimizer=True, config=config)
    # null is nothing.
    empty = {"zero_optimization": {"offload_optimizer": None}}
    DeepSpeedStrategy(stage=2, offload_optimizer=True, config=empty)


def test_a_parameter_without_a_dimension_is_named() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match=r"'scale' has no dimension.* shape \(1,\)"):
        check_parameters(model, Precision())


def test_a_parameter_without_elements_is_named_at_stage_3() -> None:
    model = nn.Linear(2, 2)
    check_elements(model)
    model.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"'empty' has no elements.*\(0, 3\).*'fsdp'"):
        check_elements(model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stage": 2}, None),
        ({"stage": 3, "offload_parameters": True}, None),
        (
            {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme"},
            "offload_params_device='nvme'",
        ),
        (
            {"stage": 3, "config": {"zero_optimization": {"zero_quantized_weights": True}}},
            "zero_quantized_weights",
        ),
        (
            {"stage": 3, "config": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
            "zero_hpz_partition_size",
        ),
    ],
)
def test_ranks_follow_an_evaluation_but_with_options_that_are_named(
    options: dict[str, Any], expected: str | None
) -> None:
    strategy = DeepSpeedStrategy(**options)
    assert why_not_followed(strategy._config()) == expected
    assert strategy.follows_evaluation == (expected is None)


def test_float64_parameter_is_refused_unless_converted() -> None:
    model = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"'weight' is of torch.float64.*model.float\(\)"):
        check_parameters(model, Precision())
    check_parameters(model, EnginePrecision("bf16-mixed"))
    check_parameters(model.requires_grad_(False), Precision())


def test_an_optimizer_that_has_taken_a_step_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"zero_optimization": {"stage": 1}}
    assert suited(optimizer, dict(config)) is optimizer
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    expected = r"the SGD has the state of earlier steps.* before its first step.*Lite\.load"
    with pytest.raises(ConfigurationError, match=expected):
        suited(optimizer, config)


def test_optimizer_with_extra_state_dict_entries_is_refused() -> None:
    class Counts(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "steps": 3}

    optimizer = Counts(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"state_dict of Counts has the entries steps of"):
        suited(optimizer, {"zero_optimization": {"stage": 1}})


def test_a_complex_parameter_is_named() -> None:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    expected = r"'phase' is complex \(torch.complex64\).*view_as_complex"
    with pytest.raises(ConfigurationError, match=expected):
        check_parameters(model, Precision())


def test_an_automatic_size_is_left_to_deepspeed() -> None:
    user = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"}}
    made = engine_config(Options(), user, Facts())
    assert "stage3_param_persistence_threshold" not in made["zero_optimization"]


@pytest.mark.parametrize("value", [-5, 0, "big", True, 1.5])
def test_a_size_is_a_positive_whole_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"reduce_bucket_size=.*: expected a whole number"):
        DeepSpeedStrategy(reduce_bucket_size=value)


def test_where_to_offload_needs_something_to_offload() -> None:
    with pytest.raises(ConfigurationError, match=r"'cpu' says where to, but nothing is offloaded"):
        DeepSpeedStrategy(stage=2, offload_optimizer_device="cpu")
    DeepSpeedStrategy(reduce_bucket_size=2e8)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
def test_adam_of_a_config_is_fused_where_its_kernels_can_be_had(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(
        op_builds, "build", lambda name, device_type: built.append((name, device_type))
    )
    zero: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    config: dict[str, Any] = {**zero, "optimizer": {"type": kind, "params": {"lr": 0.1}}}
    monkeypatch.setattr(ops, "_has_nvcc", lambda: True)
    build_ops(config, "cuda")
    assert built == [("fused_adam", "cuda")]
    # Not on a device without such kernels, and not for other optimizers.
    build_ops(config, "cpu")
    build_ops({**zero, "optimizer": {"type": kind, "params": {"torch_adam": True}}}, "cuda")
    build_ops({**zero, "optimizer": {"type": "SGD"}}, "cuda")
    assert len(built) == 1
    monkeypatch.setattr(ops, "_has_nvcc", lambda: False)
    build_ops(config, "cuda")
    assert len(built) == 1
    assert not can_fuse_adam("cuda")
    use_torchs_adam(config)
    assert config["optimizer"]["params"] == {"lr": 0.1, "torch_adam": True}


def test_missing_nvcc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_has_nvcc", lambda: False)
    missing = ops.what_is_missing("fused_adam")
    assert missing.startswith("CUDA's compiler nvcc is missing: install CUDA's toolkit of torch's")
    assert missing.endswith("(torch's Adam)")


def test_missing_machine_features_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preparation, "_cpu_has_float16", lambda: False)
    with pytest.raises(ConfigurationError, match=r"no float16 arithmetic.*pass precision='bf16-mi"):
        preparation.check_float16({"fp16": {"enabled": True}}, "cpu", "16-mixed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(op_builds, "what_is_missing", lambda name, has_header: "no compiler")
    with pytest.raises(ConfigurationError, match="op 'cpu_adam' cannot be built here: no compiler"):
        op_builds.build("cpu_adam", "cpu")
    monkeypatch.setattr(op_builds, "what_is_missing", lambda name, has_header: "")
    monkeypatch.setattr(op_builds, "BUILD", "raise SystemExit('no {builder}')")
    with pytest.raises(ConfigurationError, match=r"no CPUAdamBuilder\nMend that"):
        op_builds.build("cpu_adam", "cpu")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    with pytest.raises(
        ConfigurationError, match=r"TORCH_CUDA_ARCH_LIST, received '9.0a': unset it"
    ):
        op_builds.build("cpu_adam", "cpu")
    monkeypatch.setattr(library, "version_of", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"DeepSpeed is not installed, .*: pip install '"):
        library.installed_version()
