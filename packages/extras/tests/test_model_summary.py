"""The table of a model's layers says what is there, and leaves the model as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.callbacks import ModelSummary, full_numel, summarize
from stratagem.errors import ConfigurationError


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.head = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.head.weight.requires_grad = False
        self.encoder[2].eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.head(self.encoder(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **options,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(8, 8), 4)  # type: ignore[arg-type]


def test_the_table_has_layers_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(enable_model_summary=True).fit(Net(), loader())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split(" | ")[1:4] == ["Name   ", "Type      ", "Params"]
    assert [line.split() for line in lines[2:5]] == [
        ["0", "|", "encoder", "|", "Sequential", "|", "44", "|", "train", "|", "?"],
        ["1", "|", "head", "|", "Linear", "|", "16", "|", "train", "|", "?"],
        ["2", "|", "tied", "|", "Linear", "|", "16", "|", "train", "|", "?"],
    ]
    totals = [line.split()[0] for line in lines[6:12]]
    assert totals == ["44", "16", "60", "0.000", "5", "1"]


def test_an_example_adds_sizes_and_flops_and_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Sized(Net):
        example_input_array = torch.ones(2, 8)

    plain, sized = Net(), Sized()
    sized.load_state_dict(plain.state_dict())
    for model in (plain, sized):
        torch.manual_seed(1)
        trainer(ModelSummary(max_depth=-1)).fit(model, loader())
    for name, value in plain.state_dict().items():
        assert torch.equal(sized.state_dict()[name], value), name
    assert not sized.encoder[2].training
    assert sized.encoder[1].training
    table = capsys.readouterr().err
    assert "In sizes | Out sizes" in table
    summary = summarize(sized, -1, example=torch.ones(2, 8))
    by_name = {layer.name: layer for layer in summary.layers}
    assert (by_name["encoder.0"].in_size, by_name["encoder.0"].out_size) == ([2, 8], [2, 4])
    assert by_name["encoder.0"].flops == 2 * 2 * 8 * 4
    assert by_name["encoder"].flops == by_name["encoder.0"].flops
    assert summary.total_flops == 2 * 2 * 8 * 4 + 2 * (2 * 2 * 4 * 4)
    assert summary.non_trainable_parameters == 16
    assert summary.model_size == 60 * 4 / 1e6


def test_layers_that_have_no_weights_yet_or_take_no_hooks_are_in_the_table() -> None:
    lazy = summarize(torch.nn.Sequential(torch.nn.LazyLinear(2)))
    assert (lazy.total_parameters, lazy.model_size) == (0, 0)

    class Takes(torch.nn.Module):
        def forward(self, batch: Any) -> None:
            return None

    assert summarize(torch.nn.Sequential(Takes()), example=[]).layers[0].in_size == "?"

    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated")
        layers[0] = torch.jit.script(layers[0])
    scripted = summarize(layers, example=torch.zeros(4, 5))
    assert [layer.in_size for layer in scripted.layers] == ["?", [4, 3]]


def test_large_numbers_are_short() -> None:
    assert "4.2 M" in str(summarize(nn.Sequential(nn.Linear(2048, 2048))))
    assert "1.1 K" in str(summarize(nn.Sequential(nn.Linear(32, 32))))


def test_parameters_count_whole_where_a_rank_holds_a_part() -> None:
    parameter = nn.Parameter(torch.zeros(0))
    parameter.ds_numel = 12  # type: ignore[attr-defined]  # as an engine leaves it
    assert full_numel(parameter) == 12
    assert full_numel(nn.UninitializedParameter()) == 0


def test_the_table_is_there_once_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    own = ModelSummary(max_depth=0)
    one = trainer(own, enable_model_summary=True)
    assert [c for c in one.callbacks if isinstance(c, ModelSummary)] == [own]
    trainer(own).fit(Net(), loader())
    trainer().fit(Net(), loader())
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigurationError, match=r"ModelSummary\(max_depth=-2\)"):
        ModelSummary(max_depth=-2)


def test_model_summary_prints_once_with_unsharded_sizes(run_script: Any) -> None:
    done = run_script(
        """
        import torch
        from torch.utils.data import DataLoader
        from stratagem import Module, Trainer

        class Net(Module):
            example_input_array = torch.ones(2, 8)
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 5)
            def forward(self, x):
                return self.layer(x)
            def training_step(self, batch, batch_idx):
                return self(batch).square().mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = Trainer(accelerator="cpu", devices=2, strategy="fsdp", max_steps=1,
                          logger=False, enable_checkpointing=False, enable_progress_bar=False,
                          enable_model_summary=True)
        trainer.fit(Net(), DataLoader(torch.ones(8, 8), 2))
        """
    )
    assert done.stderr.count("Total params") == 1
    assert "45        Total params" in done.stderr
    assert "[2, 5]" in done.stderr
