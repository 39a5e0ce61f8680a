"""Mistakes planted in a mesh, and what the comparison says: `python mesh_plants.py OUT`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import expert_models
import torch
import torch.distributed as dist
from context_models import WORDS, Encoder
from context_numbers import dropout
from tensor_divide import masks
from tensor_models import TIED, TOKENS, Language
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, pad

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem_mesh.check.comparison import Subject, compare, default_loss
from stratagem_mesh.context import attention, collectives as sequence, regions
from stratagem_mesh.expert import dispatch
from stratagem_mesh.pipeline import staged_model, training
from stratagem_mesh.randomness import OwnStream
from stratagem_mesh.context.transformers_models import TransformersModel
from stratagem_mesh.tensor import collectives as features, layers, region, styles
from stratagem_torch.sharding import clipping

FORKED: dict[str, Any] = {"launcher": "fork"}


class Noise(nn.Module):
    """Adds numbers that it draws itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class Noisy(Language):
    """Draws numbers between its divided layers."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.norm: nn.Module = nn.Sequential(self.norm, Noise())


class Scores(nn.Module):
    """A region that returns the loss of each position."""

    shifts = False

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, WORDS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if self.shifts:
            labels = next_words(labels)
        words = self.head(hidden).transpose(1, 2)
        return cross_entropy(words, labels, reduction="none")


class Scored(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.scores = Scores()

    def forward(self, ids: Tensor) -> Tensor:
        labels = ids if Scores.shifts else next_words(ids)
        losses: Tensor = self.scores(self.words(ids), labels)
        return losses.mean()


def next_words(labels: Tensor) -> Tensor:
    return pad(labels[:, 1:], (0, 1), value=-100)


def batch(index: int) -> Tensor:
    return torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(index))


def loss(model: Any, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


LANGUAGE = Subject(Noisy, batch, loss, {"tensor": 2, "example_input": TOKENS, **FORKED})
TIES = Subject(Language, batch, loss, {"tensor": 2, "tensor_plan": TIED, **FORKED})
ENCODER = Subject(partial(Encoder, causal=True), batch, loss, {"context": 2, **FORKED})
UNCHECKED = Subject(ENCODER.build, batch, loss, {**ENCODER.options, "check_context": False})
EXPERTS = Subject(
    expert_models.Written,
    expert_models.batch,
    expert_models.loss,
    {"expert": 2, "expert_modules": ["layers.*.experts"], **FORKED},
)
STAGES = Subject(Language, batch, loss, {"pipeline": 2, **FORKED})
SCORED = Subject(
    Scored,
    batch,
    loss,
    {"context": 2, "context_modules": ["scores"], "check_context": False, **FORKED},
)


def mistakes(*patches: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for one in patches:
        stack.enter_context(one)
    return stack


def summed_twice(ctx: Any, gradient: Tensor) -> Any:
    return 2 * features.sum_of_ranks(gradient, ctx.mesh), None


def summed_over_sequence(ctx: Any, gradient: Tensor) -> Any:
    group, dim = ctx.arguments
    return group.join(gradient, dim), None, None


def divided_again(whole: nn.Parameter, region: Any, placement: Any) -> nn.Parameter:
    region.divided.clear()
    return DIVIDED(whole, region, placement)


DIVIDED = styles.divided


def without_gradient(self: Any, layer: nn.Module, key: str, parameter: Any) -> Tensor:
    local: Tensor = parameter.to_local()
    return local.detach()


def in_part(self: Any, layer: nn.Module, key: str, parameter: Any) -> Tensor:
    local: Tensor = parameter.to_local()
    return local


def all_ranks(gradient: Tensor) -> Any:
    return (dist.group.WORLD,)


def not_restored(self: region.Region) -> None:
    self._entered = self._outside = None


def no_mask(*arguments: Any) -> tuple[None, bool]:
    return None, False


def no_boundary(self: staged_model._Forward, value: Any) -> Tensor:
    """Return zeros, where a stage waits for a value of the stage before."""
    received = RECEIVED(self, value)
    return torch.zeros_like(received, requires_grad=received.requires_grad)


RECEIVED = staged_model._Forward.get


def tied_twice(parameters: Any, group: Any, count: int) -> None:
    """Sum the gradients of the stages that hold a weight, and once more."""
    AVERAGE(parameters, group, count)
    AVERAGE(parameters, group, count)


AVERAGE = training.average_gradients


def without_last(self: training.Pipeline, prepared: Any, step: Any, micro_batches: Any) -> None:
    TRAIN(self, prepared, step, micro_batches[:-1])


TRAIN = training.Pipeline.train


@dataclass(frozen=True)
class Plant:
    """A mistake in a subject's mesh."""

    subject: Subject
    plant: Callable[[], AbstractContextManager[Any]] = ExitStack


PLANTS = {
    "nothing, tensor": Plant(LANGUAGE),
    "nothing, tied": Plant(TIES),
    "nothing, context": Plant(UNCHECKED),
    "nothing, labels": Plant(SCORED),
    "nothing, experts": Plant(EXPERTS),
    "expert gradients too large": Plant(
        EXPERTS,
        lambda: patch.object(dispatch, "divide_gradient", lambda parameter, size: parameter),
    ),
    "a gradient summed twice": Plant(
        LANGUAGE, lambda: patch.object(features._Copy, "backward", staticmethod(summed_twice))
    ),
    "a gradient summed over a sequence": Plant(
        ENCODER,
        lambda: patch.object(sequence._Cut, "backward", staticmethod(summed_over_sequence)),
    ),
    "a gradient of a part": Plant(
        LANGUAGE, lambda: patch.object(styles.Replicated, "local", in_part)
    ),
    "a norm counted twice": Plant(LANGUAGE, lambda: patch.object(clipping, "_ranks_of", all_ranks)),
    "numbers of other seeds": Plant(
        LANGUAGE,
        lambda: mistakes(
            patch.object(layers, "draws_numbers", lambda model: True),
            patch.object(region.Region, "end", not_restored),
        ),
    ),
    "a mask dropped": Plant(UNCHECKED, lambda: patch.object(attention, "_whole_mask", no_mask)),
    "a mask dropped, checked": Plant(
        ENCODER, lambda: patch.object(attention, "_whole_mask", no_mask)
    ),
    "labels cut before the shift": Plant(SCORED, lambda: patch.object(Scores, "shifts", True)),
    "a tied weight divided twice": Plant(
        TIES, lambda: patch.object(styles, "divided", divided_again)
    ),
    "the gradient of a tied weight lost": Plant(
        TIES, lambda: patch.object(styles.ColwiseGathered, "local", without_gradient)
    ),
}


PLANTS |= {
    "nothing, stages": Plant(STAGES),
    "a boundary lost": Plant(
        STAGES, lambda: patch.object(staged_model._Forward, "get", no_boundary)
    ),
    "a tied weight summed twice": Plant(
        STAGES, lambda: patch.object(training, "average_gradients", tied_twice)
    ),
    "a micro-batch dropped": Plant(
        STAGES, lambda: patch.object(training.Pipeline, "train", without_last)
    ),
}


def llama() -> Any:
    from context_transformers import KEYS, made

    return made("LlamaForCausalLM", "LlamaConfig", **KEYS)


def words(index: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


def not_shifted(self: TransformersModel, call: Any, inputs: dict[str, Any]) -> None:
    self._shifts = False
    DIVIDED_LOSS(self, call, inputs)


DIVIDED_LOSS = TransformersModel._divide_loss

if find_spec("transformers"):
    LLAMA = Subject(llama, words, default_loss, UNCHECKED.options)
    PLANTS["nothing, transformers"] = Plant(LLAMA)
    PLANTS["labels of transformers cut before the shift"] = Plant(
        LLAMA, lambda: patch.object(TransformersModel, "_divide_loss", not_shifted)
    )


def found(plant: Plant) -> dict[str, str]:
    """Return the quantities that differ, and where; or the error."""
    try:
        with plant.plant():
            rows = compare(plant.subject, 2)
    except StratagemError as error:
        return {type(error).__name__: str(error)}
    return {row.what: row.where for row in rows if not row.is_equal}


def seeds() -> dict[str, Any]:
    """Return whether the dropout of ranks is equal, with own seeds and with a shared one."""
    lite = Lite(accelerator="cpu", devices=2, strategy="ddp_fork")
    return {"own": lite.launch(equal, False), "shared": lite.launch(equal, True)}


def equal(lite: Lite, is_shared: bool) -> dict[str, bool]:
    own = OwnStream
    with ExitStack() as stack:
        if is_shared:
            stack.enter_context(
                patch.object(regions, "OwnStream", lambda rank, generators: own(0, generators))
            )
            stack.enter_context(patch.object(region.Region, "begin", lambda self, layer: None))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
        inside = lite.ranks.gather_objects(masks(mesh)[0][0])
        return {
            "features": inside[0] == inside[1],
            "positions": dropout(lite.global_rank)["parts are equal"],
        }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # torch warns of every last layer that reads sequences
    chosen = {name: PLANTS[name] for name in sys.argv[2:] or PLANTS}
    said = {name: found(plant) for name, plant in chosen.items()}
    Path(sys.argv[1]).write_text(json.dumps({"said": said, "seeds": seeds()}))
