"""Trains models of libraries that stand on Lightning, with it and with `stratagem_lightning`.

They are installed as they come from the index, and neither they nor what is below has a line for
Stratagem. Numbers may differ by 1e-5 of the largest (the mean of an epoch in float64 or float32)::

    nox -s "libraries(library='scvi-tools')"
    python benchmarks/libraries.py scvi-tools
    RANKS=2 python benchmarks/libraries.py deeptab
    RANKS=2 STRATEGY=ddp_find_unused_parameters_true python benchmarks/libraries.py ts3l

chemprop's, darts' and pytorch-forecasting's checkpoints hold objects, which Stratagem refuses to
store: here their models train, and are not saved.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

MARK = "numbers: "
RANKS = int(os.environ.get("RANKS", "1"))
ON_CPU: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS, "enable_progress_bar": False}
if RANKS > 1:
    ON_CPU["strategy"] = os.environ.get("STRATEGY", "ddp")


def tell(*values: Any) -> None:
    """Print numbers that are to be the same; rank 0 does."""
    import numpy as np

    if os.environ.get("LOCAL_RANK", "0") != "0" or not values:
        return

    flat = [np.asarray(value, dtype=float).reshape(-1) for value in values]
    print(f"{MARK}{json.dumps(np.concatenate(flat).tolist())}")


def sums(model: Any) -> list[float]:
    """Return the sum of each of a model's floating-point weights, of absolute values."""
    weights = (w for _, w in sorted(model.state_dict().items()) if hasattr(w, "is_floating_point"))
    return [float(w.double().abs().sum()) for w in weights if w.is_floating_point()]


def logged(trainer: Any) -> list[float]:
    """Return what was logged last, sorted by name; nothing with several ranks.

    A value that is not synced is then that of rank 0 in Lightning, and the mean in Stratagem.
    """
    if RANKS > 1:
        return []
    return [float(value) for _, value in sorted(trainer.callback_metrics.items())]


def neuralforecast() -> None:
    """Two models: validation by steps with early stopping; saved and loaded; cross-validation."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NBEATS, NHITS
    from neuralforecast.utils import AirPassengersDF

    options = {"h": 12, "input_size": 24, "max_steps": 20, **ON_CPU}
    stops = NBEATS(val_check_steps=5, early_stop_patience_steps=2, **options)
    forecast = NeuralForecast(models=[NHITS(**options), stops], freq="M")
    forecast.fit(df=AirPassengersDF, val_size=12)
    own = forecast.predict().iloc[:, 2:].to_numpy()
    forecast.save("saved", overwrite=True)
    loaded = NeuralForecast.load("saved").predict(df=AirPassengersDF).iloc[:, 2:].to_numpy()
    tell(own, abs(own - loaded).max())
    windows = forecast.cross_validation(df=AirPassengersDF, n_windows=2, val_size=12)
    tell(windows.iloc[:, 3:].to_numpy())


def gluonts() -> None:
    """A network that is chosen by its validation."""
    import numpy as np
    import pandas as pd
    import torch
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import SimpleFeedForwardEstimator

    np.random.seed(0)
    torch.manual_seed(0)
    days = pd.date_range("2020-01-01", periods=300, freq="D")
    frame = pd.DataFrame({"target": np.sin(np.arange(300) / 7).astype("float32")}, index=days)
    data = PandasDataset(frame, target="target", freq="D", dtype=np.float32)
    estimator = SimpleFeedForwardEstimator(
        prediction_length=12, num_batches_per_epoch=10, trainer_kwargs={"max_epochs": 2, **ON_CPU}
    )
    predictor = estimator.train(data, validation_data=data)
    weights = predictor.prediction_net.state_dict().values()
    tell(sum(float(w.double().abs().sum()) for w in weights if w.is_floating_point()))


def scvi_tools() -> None:
    """A variational model with early stopping and the library's own logger; saved and loaded."""
    import scvi

    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=100, n_genes=50)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_latent=5)
    model.train(max_epochs=4, early_stopping=True, check_val_every_n_epoch=1, **ON_CPU)
    model.save("saved", overwrite=True)
    loaded = scvi.model.SCVI.load("saved", cells)
    own = model.get_latent_representation()
    tell(own[:5], abs(loaded.get_latent_representation() - own).max())
    tell(*(values.to_numpy() for name, values in sorted(model.history.items())))


def pytorch_tabular() -> None:
    """A classifier with the library's checkpoints and metrics; saved and loaded."""
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    random = np.random.RandomState(0)
    names = [f"f{i}" for i in range(8)]
    frame = pd.DataFrame(random.randn(400, 8), columns=names)
    frame["kind"] = random.choice(list("abc"), 400)
    frame["target"] = (frame.f0 + frame.f1 > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=names, categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=64, max_epochs=4, accelerator="cpu", progress_bar="none", load_best=False
        ),
        verbose=False,
    )
    model.fit(train=frame[:320], validation=frame[320:])
    model.save_model("saved")
    loaded = TabularModel.load_model("saved")
    for one in (model, loaded):
        tell(one.predict(frame[320:])["target_1_probability"].to_numpy()[:5])
    tell(*model.evaluate(frame[320:], verbose=False)[0].values())


def chemprop() -> None:
    """A message-passing network: fitted, tested, predicted with."""
    import numpy as np
    import torch
    from chemprop import data, models, nn
    from lightning import pytorch as pl

    pl.seed_everything(0)
    smiles = ["C" * k + end for k in range(1, 12) for end in ("O", "N", "Cl", "C(=O)O")]
    values = np.array([[len(one) * 0.3 + ("O" in one)] for one in smiles])
    points = [data.MoleculeDatapoint.from_smi(s, y) for s, y in zip(smiles, values, strict=True)]
    train = data.MoleculeDataset(points[:36])
    scaler = train.normalize_targets()
    loader = data.build_dataloader(train, num_workers=0)
    held_back = data.MoleculeDataset(points[36:])
    other = data.build_dataloader(held_back, num_workers=0, shuffle=False)
    unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
    head = nn.RegressionFFN(input_dim=32, output_transform=unscale)
    model = models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), head)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, max_epochs=5, **ON_CPU)
    trainer.fit(model, loader)
    tested = trainer.test(model, other)[0].values()
    tell(*tested, torch.cat(trainer.predict(model, other)).numpy())


def darts() -> None:
    """Two models of series, one with a callback of the user's."""
    import numpy as np
    from darts.models import NBEATSModel, RNNModel
    from darts.utils.timeseries_generation import sine_timeseries
    from pytorch_lightning.callbacks import EarlyStopping

    series = sine_timeseries(length=150, value_frequency=0.05).astype(np.float32)
    options: dict[str, Any] = {"random_state": 0, "pl_trainer_kwargs": dict(ON_CPU), "n_epochs": 3}
    small = {"num_stacks": 2, "num_blocks": 1, "layer_widths": 16}
    model = NBEATSModel(24, 12, **small, **options)
    model.fit(series[:120], val_series=series[90:])
    stopping = EarlyStopping(monitor="val_loss", patience=2, min_delta=0.01, mode="min")
    options["pl_trainer_kwargs"]["callbacks"] = [stopping]
    other = RNNModel(24, model="LSTM", hidden_dim=8, training_length=30, **options)
    other.fit(series[:120], val_series=series[90:])
    tell(model.predict(3).values(), other.predict(3).values())


def anomalib() -> None:
    """A model of image patches, whose metrics are callbacks that log."""
    import numpy as np
    import torch
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import Padim
    from PIL import Image

    torch.manual_seed(0)
    random = np.random.RandomState(0)
    for kind, count in (("good", 12), ("bad", 4)):
        Path("images", kind).mkdir(parents=True)
        for number in range(count):
            pixels = (random.rand(64, 64, 3) * 40 + 100).astype("uint8")
            pixels[20:40, 20:40] += 60 * (kind == "bad")
            Image.fromarray(pixels).save(Path("images", kind, f"{number}.png"))
    sizes = {"train_batch_size": 4, "eval_batch_size": 4, "num_workers": 0, "seed": 0}
    data = Folder(name="x", root="images", normal_dir="good", abnormal_dir="bad", **sizes)
    small = {"backbone": "resnet18", "layers": ["layer1"], "n_features": 10}
    model = Padim(pre_trained=False, **small)
    engine = Engine(max_epochs=1, default_root_dir="out", **ON_CPU)
    engine.fit(model=model, datamodule=data)
    tell(*engine.test(model=model, datamodule=data)[0].values())


def torch_geometric() -> None:
    """A network of graphs, by the library's DataModule, tested with its best checkpoint."""
    import lightning.pytorch as pl
    import torch
    from torch.nn.functional import mse_loss
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GCNConv, global_mean_pool

    pl.seed_everything(0)

    def graph(nodes: int) -> Any:
        features = torch.randn(nodes, 4)
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        return Data(x=features, edge_index=edges, y=features.mean().view(1))

    class Net(pl.LightningModule):  # type: ignore[misc]  # not annotated
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(4, 16)
            self.head = torch.nn.Linear(16, 1)

        def forward(self, graphs: Any) -> Any:
            hidden = self.conv(graphs.x, graphs.edge_index).relu()
            return mse_loss(self.head(global_mean_pool(hidden, graphs.batch)).view(-1), graphs.y)

        def training_step(self, graphs: Any, batch_idx: int) -> Any:
            return self(graphs)

        def validation_step(self, graphs: Any, batch_idx: int) -> None:
            self.log("val", self(graphs), batch_size=graphs.num_graphs, prog_bar=True)

        def test_step(self, graphs: Any, batch_idx: int) -> None:
            self.log("test", self(graphs), batch_size=graphs.num_graphs)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    graphs = [graph(6 + i % 4) for i in range(60)]
    data = LightningDataset(graphs[:40], graphs[40:50], graphs[50:], batch_size=8)
    saver = pl.callbacks.ModelCheckpoint(monitor="val")
    trainer = pl.Trainer(max_epochs=3, callbacks=[saver], **ON_CPU)
    trainer.fit(Net(), data)
    tell(*trainer.test(ckpt_path="best", datamodule=data)[0].values(), saver.best_model_score)


def lightly() -> None:
    """Contrastive training with the library's callback, which reads what was logged."""
    import numpy as np
    import pytorch_lightning as pl
    import torch
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.utils.benchmarking import MetricCallback, OnlineLinearClassifier
    from torch import nn

    pl.seed_everything(0)

    class SimCLR(pl.LightningModule):  # type: ignore[misc]  # not annotated
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU())
            self.head = SimCLRProjectionHead(8, 16, 8)
            self.criterion = NTXentLoss()
            self.classifier = OnlineLinearClassifier(feature_dim=8, num_classes=10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, other, label = batch
            features = self.backbone(one)
            loss = self.criterion(self.head(features), self.head(self.backbone(other)))
            others, values = self.classifier.training_step((features.detach(), label), batch_idx)
            self.log("train_loss", loss)
            self.log_dict(values, sync_dist=True, batch_size=len(label))
            return loss + others

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            features = self.backbone(batch[0])
            loss, values = self.classifier.validation_step((features, batch[2]), batch_idx)
            self.log_dict(values, prog_bar=True, sync_dist=True, batch_size=len(batch[2]))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    images = torch.rand(2, 40, 3, 4, 4)
    data = torch.utils.data.TensorDataset(*images, torch.arange(40) % 10)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    metrics, rates = MetricCallback(), pl.callbacks.LearningRateMonitor()
    trainer = pl.Trainer(max_epochs=2, callbacks=[metrics, rates], log_every_n_steps=1, **ON_CPU)
    trainer.fit(SimCLR(), loader, torch.utils.data.DataLoader(data, batch_size=8))
    for values in (metrics.train_metrics, metrics.val_metrics):
        tell(*(np.array(values[name]) for name in sorted(values)))


def pytabkit() -> None:
    """A network of tables with the library's schedules, in manual optimization."""
    import numpy as np
    from pytabkit import RealMLP_TD_Classifier

    random = np.random.RandomState(0)
    table = random.randn(400, 6).astype("float32")
    kinds = (table[:, 0] + table[:, 1] > 0).astype(int)
    sizes: dict[str, Any] = {"hidden_sizes": [32, 32], "batch_size": 64, "n_epochs": 3}
    model = RealMLP_TD_Classifier(device="cpu", random_state=0, n_cv=1, n_refit=0, **sizes)
    model.fit(table, kinds)
    tell(model.predict_proba(table[:50]))


def pina() -> None:
    """A differential equation, with all points at once and in batches; tested."""
    import torch
    from pina import Condition, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation, FixedValue
    from pina.model import FeedForward
    from pina.operator import grad
    from pina.problem import SpatialProblem
    from pina.solver import PINN

    torch.manual_seed(0)

    def difference(inputs: Any, outputs: Any) -> Any:
        return grad(outputs, inputs, components=["u"], d=["x"]) - outputs.extract(["u"])

    class Problem(SpatialProblem):  # type: ignore[misc]  # not annotated
        output_variables = ["u"]  # noqa: RUF012
        spatial_domain = CartesianDomain({"x": [0, 1]})
        domains = {"start": CartesianDomain({"x": 0.0}), "all": spatial_domain}  # noqa: RUF012
        conditions = {  # noqa: RUF012
            "start": Condition(domain="start", equation=FixedValue(1.0)),
            "all": Condition(domain="all", equation=Equation(difference)),
        }

    problem = Problem()
    problem.discretise_domain(1, "random", domains=["start"])
    problem.discretise_domain(30, "lh", domains=["all"])
    sizes = {"train_size": 0.8, "val_size": 0.1, "test_size": 0.1}
    for batch_size in (None, 8):
        solver = PINN(problem, FeedForward(layers=[8, 8], input_dimensions=1, output_dimensions=1))
        trainer = Trainer(solver, max_epochs=20, batch_size=batch_size, **sizes, **ON_CPU)
        trainer.train()
        trainer.test()
        tell(*logged(trainer), *sums(solver))


def pytorch_lifestream() -> None:
    """Contrastive training on sequences that are cut at random places, drawn from numpy."""
    from functools import partial

    import numpy as np
    import pytorch_lightning as pl
    import torch
    from ptls.data_load.datasets import MemoryMapDataset
    from ptls.frames import PtlsDataModule
    from ptls.frames.coles import ColesDataset, CoLESModule
    from ptls.frames.coles.split_strategy import SampleSlices
    from ptls.nn import RnnSeqEncoder, TrxEncoder

    pl.seed_everything(0)
    random = np.random.RandomState(0)

    def client() -> dict[str, Any]:
        kinds, amounts = random.randint(1, 10, 40), random.randn(40).astype("float32")
        times = torch.arange(40)
        return {"kind": torch.tensor(kinds), "amount": torch.tensor(amounts), "event_time": times}

    clients = [client() for _ in range(60)]
    slices = SampleSlices(split_count=3, cnt_min=5, cnt_max=15)
    data = PtlsDataModule(
        train_data=ColesDataset(MemoryMapDataset(clients), slices),
        valid_data=ColesDataset(MemoryMapDataset(clients[:20]), slices),
        train_num_workers=0,
        train_batch_size=16,
        valid_num_workers=0,
        valid_batch_size=8,
    )
    kinds = {"kind": {"in": 10, "out": 4}}
    encoder = TrxEncoder(embeddings=kinds, numeric_values={"amount": "identity"})
    model = CoLESModule(
        seq_encoder=RnnSeqEncoder(encoder, hidden_size=16, type="gru"),
        optimizer_partial=partial(torch.optim.Adam, lr=0.01),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
    )
    trainer = pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, **ON_CPU)
    trainer.fit(model, data)
    tell(*logged(trainer), *sums(model))


def rl4co() -> None:
    """A policy of routes, whose data are made anew in each epoch; tested."""
    import torch
    from rl4co.envs import TSPEnv
    from rl4co.models import REINFORCE, AttentionModelPolicy
    from rl4co.utils import RL4COTrainer

    torch.manual_seed(0)
    small = {"embed_dim": 16, "num_encoder_layers": 1, "num_heads": 2, "feedforward_hidden": 16}
    sizes = {"batch_size": 16, "train_data_size": 64, "val_data_size": 32, "test_data_size": 32}
    environment = TSPEnv(generator_params={"num_loc": 8})
    policy = AttentionModelPolicy(env_name="tsp", **small)
    model = REINFORCE(environment, policy, "rollout", dataloader_num_workers=0, **sizes)
    options: dict[str, Any] = {"logger": None, "enable_checkpointing": False}
    trainer = RL4COTrainer(max_epochs=3, precision="16-mixed", **options, **ON_CPU)
    trainer.fit(model)
    tell(*logged(trainer), *sums(model))
    trainer.test(model)
    tell(*logged(trainer))


def torchgeo() -> None:
    """Segmentation of images by the library's task and its plots; tested."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader
    from torchgeo.trainers import SemanticSegmentationTask

    pl.seed_everything(0)
    images, masks = torch.rand(16, 3, 32, 32), torch.randint(0, 2, (16, 32, 32))
    samples = [{"image": one, "mask": mask} for one, mask in zip(images, masks, strict=True)]
    data: Any = samples  # a list serves as a dataset
    small = {"model": "unet", "backbone": "resnet18", "in_channels": 3}
    task = SemanticSegmentationTask(task="multiclass", num_classes=2, **small)
    trainer = pl.Trainer(max_epochs=2, log_every_n_steps=1, **ON_CPU)
    trainer.fit(task, DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
    trainer.test(task, DataLoader(data, 4))
    tell(*logged(trainer), *sums(task))


def pytorch_forecasting() -> None:
    """A temporal fusion transformer with early stopping, and its predictions."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    pl.seed_everything(0)
    time = np.arange(120)
    parts = [
        pd.DataFrame({"time": time, "group": name, "value": np.sin(time / 7 + shift) + 2})
        for shift, name in enumerate("ab")
    ]
    frame = pd.concat(parts, ignore_index=True)
    train = TimeSeriesDataSet(
        frame[frame.time < 100],
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["group"],
        time_varying_unknown_reals=["value"],
    )
    last = TimeSeriesDataSet.from_dataset(train, frame, predict=True, stop_randomization=True)
    held_back = last.to_dataloader(train=False, batch_size=8, num_workers=0)
    small = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4}
    model = TemporalFusionTransformer.from_dataset(train, loss=QuantileLoss(), **small)
    stopping = pl.callbacks.EarlyStopping("val_loss")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, **ON_CPU}
    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=0.1, callbacks=[stopping], **quiet)
    loader = train.to_dataloader(train=True, batch_size=32, num_workers=0)
    trainer.fit(model, loader, held_back)
    tell(*logged(trainer), *sums(model))
    predicted = model.predict(held_back, trainer_kwargs={"accelerator": "cpu", "logger": False})
    tell(predicted.numpy())


def optuna_integration() -> None:
    """A search whose callback ends the worse of its trials."""
    import lightning.pytorch as pl
    import optuna
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from optuna_integration import PyTorchLightningPruningCallback

    class Model(BoringModel):  # type: ignore[misc]  # not annotated
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.lr = lr

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.step(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def objective(trial: Any) -> float:
        pl.seed_everything(trial.number)
        pruning = PyTorchLightningPruningCallback(trial, "val_loss")
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, **ON_CPU}
        trainer = pl.Trainer(max_epochs=4, callbacks=[pruning], **quiet)
        trainer.fit(Model(trial.suggest_float("lr", 1e-3, 1e-1, log=True)))
        return float(trainer.callback_metrics["val_loss"])

    sampler, pruner = optuna.samplers.RandomSampler(0), optuna.pruners.MedianPruner(2)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=6)
    for trial in study.trials:
        tell(int(trial.state), *(value for _, value in sorted(trial.intermediate_values.items())))


def contextualized() -> None:
    """A regression whose weights depend on a context."""
    import lightning.pytorch as pl
    import numpy as np
    from contextualized.easy import ContextualizedRegressor

    pl.seed_everything(0)
    random = np.random.RandomState(0)
    contexts, inputs = random.randn(80, 2), random.randn(80, 3)
    outputs = (inputs * contexts[:, :1]).sum(1, keepdims=True)
    model = ContextualizedRegressor(n_bootstraps=1, width=8, layers=1)
    model.fit(contexts, inputs, outputs, max_epochs=3, learning_rate=1e-2)
    tell(model.predict(contexts, inputs), *model.predict_params(contexts))


def deeptab() -> None:
    """Two classifiers of tables, with early stopping and the best weights loaded again."""
    import numpy as np
    import pandas as pd
    import torch
    from deeptab.models import FTTransformerClassifier, MLPRegressor

    torch.manual_seed(0)
    random = np.random.RandomState(0)
    table = pd.DataFrame(random.randn(200, 5), columns=list("abcde"))
    table["kind"] = random.choice(["x", "y", "z"], 200)
    kinds = (table.a + table.b > 0).astype(int).to_numpy()
    options: dict[str, Any] = {"max_epochs": 3, "batch_size": 32, "random_state": 0, **ON_CPU}
    for model, target in (
        (FTTransformerClassifier(), kinds),
        (MLPRegressor(), table.a.to_numpy() * 2),
    ):
        model.fit(table, target, **options)
        tell(model.predict(table))


def ts3l() -> None:
    """A table's encoder learnt from corrupted rows, then a classifier on it; predictions."""
    import numpy as np
    import pandas as pd
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader
    from ts3l.pl_modules import SCARFLightning
    from ts3l.utils import TS3LDataModule
    from ts3l.utils.backbone_utils import MLPBackboneConfig
    from ts3l.utils.embedding_utils import IdentityEmbeddingConfig
    from ts3l.utils.scarf_utils import SCARFConfig, SCARFDataset

    pl.seed_everything(0)
    random = np.random.RandomState(0)
    names = [f"f{i}" for i in range(8)]
    table = pd.DataFrame(random.randn(160, 8), columns=names)
    kinds = (table.f0 + table.f1 > 0).astype(int).to_numpy()
    embedding = IdentityEmbeddingConfig(input_dim=8)
    config = SCARFConfig(
        task="classification",
        loss_fn="CrossEntropyLoss",
        metric="accuracy_score",
        embedding_config=embedding,
        backbone_config=MLPBackboneConfig(input_dim=embedding.output_dim, hidden_dims=16),
        output_dim=2,
    )
    model = SCARFLightning(config)
    kwargs: dict[str, Any] = {"continuous_cols": names, "category_cols": []}
    train = SCARFDataset(table[:120], config=config, **kwargs)
    held_back = SCARFDataset(table[120:], config=config, **kwargs)
    data = TS3LDataModule(train, held_back, 16, train_sampler="random")
    trainer = pl.Trainer(max_epochs=2, **ON_CPU)
    trainer.fit(model, data)
    tell(*logged(trainer), *sums(model))
    model.set_second_phase()
    train = SCARFDataset(table[:120], kinds[:120], is_second_phase=True, **kwargs)
    held_back = SCARFDataset(table[120:], kinds[120:], is_second_phase=True, **kwargs)
    data = TS3LDataModule(train, held_back, 16, train_sampler="weighted")
    trainer = pl.Trainer(max_epochs=2, **ON_CPU)
    trainer.fit(model, data)
    tell(*logged(trainer), *sums(model))
    tell(torch.cat(trainer.predict(model, DataLoader(held_back, 16))))


def prototorch() -> None:
    """Prototypes of classes with the library's callbacks, one of which prunes them."""
    import prototorch.models as pt
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    pl.seed_everything(0)
    points = torch.randn(90, 2) + torch.arange(3).repeat_interleave(30)[:, None] * 2
    data = TensorDataset(points, torch.arange(3).repeat_interleave(30))
    loader = DataLoader(data, 16, shuffle=True)
    import prototorch as core

    options: dict[str, Any] = {"distribution": {"num_classes": 3, "per_class": 3}, "lr": 0.05}
    for kind in (pt.CELVQ, pt.GMLVQ):
        if kind is pt.GMLVQ:
            options |= {"input_dim": 2, "latent_dim": 2, "bb_lr": 0.01, "proto_lr": 0.01}
        model = kind(options, prototypes_initializer=core.initializers.SMCI(data))
        pruning = pt.callbacks.PruneLoserPrototypes(0.01, idle_epochs=1, frequency=1, verbose=False)
        trainer = pl.Trainer(
            max_epochs=3, callbacks=[pruning] if kind is pt.CELVQ else [], **ON_CPU
        )
        trainer.fit(model, loader)
        tell(*logged(trainer), *sums(model), model.num_prototypes)


def disent() -> None:
    """A variational autoencoder with a schedule of the library's."""
    import lightning as L
    from disent.dataset import DisentDataset
    from disent.dataset.data import XYObjectData
    from disent.dataset.sampling import SingleSampler
    from disent.dataset.transform import ToImgTensorF32
    from disent.frameworks.vae import BetaVae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderLinear, EncoderLinear
    from disent.schedule import CyclicSchedule
    from disent.util.lightning.callbacks import LoggerProgressCallback
    from torch.utils.data import DataLoader

    L.seed_everything(0)
    data = XYObjectData(grid_size=8, grid_spacing=4, min_square_size=1, max_square_size=3)
    dataset = DisentDataset(data, sampler=SingleSampler(), transform=ToImgTensorF32())
    model = BetaVae(
        model=AutoEncoder(
            encoder=EncoderLinear(x_shape=data.x_shape, z_size=3, z_multiplier=2),
            decoder=DecoderLinear(x_shape=data.x_shape, z_size=3),
        ),
        cfg=BetaVae.cfg(optimizer="adam", loss_reduction="mean_sum", beta=4),
    )
    model.register_schedule("beta", CyclicSchedule(period=8))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, **ON_CPU}
    progress = LoggerProgressCallback(interval=1)
    trainer = L.Trainer(max_steps=20, callbacks=[progress], **options)
    trainer.fit(model, loader)
    tell(*logged(trainer), *sums(model))


def swyft() -> None:
    """Ratios of likelihoods by the library's own Trainer; tested."""
    import numpy as np
    import swyft as library
    import torch

    torch.manual_seed(0)
    random = np.random.RandomState(0)
    z = random.rand(160, 2).astype("float32")
    x = (z + random.randn(160, 2) * 0.1).astype("float32")

    class Network(library.SwyftModule):  # type: ignore[misc]  # not annotated
        def __init__(self) -> None:
            super().__init__()
            self.ratios = library.LogRatioEstimator_1dim(2, 2, varnames="z", hidden_features=16)

        def forward(self, one: Any, other: Any) -> Any:
            return self.ratios(one["x"], other["z"])

    samples = library.Samples(x=x, z=z)
    data = library.SwyftDataModule(samples, fractions=[0.8, 0.1, 0.1], batch_size=16, shuffle=True)
    trainer = library.SwyftTrainer(max_epochs=3, logger=False, **ON_CPU)
    model = Network()
    trainer.fit(model, data)
    tell(*logged(trainer), *sums(model))
    trainer.test(model, data)
    tell(*logged(trainer))


def tensorneko() -> None:
    """A regression by the library's Trainer and model, whose hooks log."""
    import torch
    from lightning.pytorch import seed_everything
    from tensorneko import NekoModel, NekoTrainer
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, TensorDataset

    seed_everything(0)

    class Model(NekoModel):  # type: ignore[misc]  # not annotated
        def __init__(self) -> None:
            super().__init__("model")
            self.layers = torch.nn.Linear(4, 1)

        def forward(self, inputs: Any) -> Any:
            return self.layers(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = mse_loss(self(batch[0]), batch[1])
            return {"loss": loss, "root": loss.sqrt()}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    points = torch.randn(96, 4)
    data = TensorDataset(points, points.sum(1, keepdim=True))
    model = Model()
    options: dict[str, Any] = {"enable_checkpointing": False, **ON_CPU}
    trainer = NekoTrainer(logger="neko", max_epochs=3, log_every_n_steps=0, **options)
    trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 16))
    tell(*(one[name] for one in model.history for name in sorted(one)), *sums(model))


def neuralprophet() -> None:
    """A decomposed series with seasons, trained with validation; forecasts."""
    import numpy as np
    import pandas as pd
    from neuralprophet import NeuralProphet, set_random_seed

    set_random_seed(0)
    days = np.arange(200)
    frame = pd.DataFrame({"ds": pd.date_range("2020-01-01", periods=200, freq="D")})
    frame["y"] = np.sin(days / 7 * 2 * np.pi) + days / 100
    options = dict(ON_CPU)
    accelerator, progress = options.pop("accelerator"), options.pop("enable_progress_bar")
    model = NeuralProphet(
        n_lags=7,
        n_forecasts=3,
        epochs=4,
        batch_size=32,
        learning_rate=0.01,
        accelerator=accelerator,
        trainer_config=options,
    )
    train, held_back = model.split_df(frame, freq="D", valid_p=0.2)
    metrics = model.fit(
        train, freq="D", validation_df=held_back, progress="none" if not progress else "bar"
    )
    tell(metrics.select_dtypes("number").to_numpy())
    tell(model.predict(frame)["yhat1"].dropna().to_numpy())


def torchphysics() -> None:
    """A differential equation by conditions that sample their points."""
    import pytorch_lightning as pl
    import torch
    import torchphysics as tp

    pl.seed_everything(0)
    X, U = tp.spaces.R1("x"), tp.spaces.R1("u")
    interval = tp.domains.Interval(X, 0, 1)
    model = tp.models.FCN(input_space=X, output_space=U, hidden=(8, 8))
    inner = tp.samplers.RandomUniformSampler(interval, n_points=32)
    left = tp.samplers.RandomUniformSampler(interval.boundary_left, n_points=4)
    conditions = [
        tp.conditions.PINNCondition(model, inner, lambda u, x: tp.utils.grad(u, x) - u),
        tp.conditions.PINNCondition(model, left, lambda u: u - 1, weight=10),
    ]
    setting = tp.OptimizerSetting(
        torch.optim.Adam,
        lr=0.01,
        scheduler_class=torch.optim.lr_scheduler.ExponentialLR,
        scheduler_args={"gamma": 0.95},
    )
    solver = tp.solver.Solver(conditions, conditions[:1], optimizer_setting=setting)
    trainer = pl.Trainer(
        max_steps=30, logger=False, enable_checkpointing=False, val_check_interval=10, **ON_CPU
    )
    trainer.fit(solver)
    tell(*logged(trainer), *sums(model))


def neuromancer() -> None:
    """An optimization problem by the library's Trainer: its own early stopping and clipping."""
    import torch
    from neuromancer.constraint import variable
    from neuromancer.dataset import DictDataset
    from neuromancer.loss import PenaltyLoss
    from neuromancer.modules import blocks
    from neuromancer.problem import Problem
    from neuromancer.system import Node
    from neuromancer.trainer import LitTrainer

    torch.manual_seed(0)

    def data() -> Any:
        inputs = torch.linspace(0.5, 2, 128)[:, None]
        parts = inputs[::2], inputs[1::4], inputs[3::4]
        names = ("train", "dev", "test")
        sets = (DictDataset({"p": p}, name=n) for p, n in zip(parts, names, strict=True))
        return (*sets, 16)

    network = blocks.MLP(1, 2, hsizes=[8])
    solution = Node(network, ["p"], ["x"], name="map")
    x, p = variable("x"), variable("p")
    objective = ((1 - x[:, [0]]) ** 2 + p * (x[:, [1]] - x[:, [0]] ** 2) ** 2).minimize(weight=1.0)
    problem = Problem([solution], PenaltyLoss([objective], [x[:, [0]] >= x[:, [1]]]))
    options = {name: value for name, value in ON_CPU.items() if name != "enable_progress_bar"}
    trainer = LitTrainer(epochs=4, patience=2, warmup=1, **options)
    trainer.fit(problem, data)
    tell(*logged(trainer), *sums(problem))


def rectools() -> None:
    """Two transformers that recommend."""
    import numpy as np
    import pandas as pd
    from lightning_fabric import seed_everything
    from pytorch_lightning import Trainer
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import BERT4RecModel, SASRecModel

    seed_everything(0, workers=True)
    random = np.random.RandomState(0)
    frame = pd.DataFrame(
        {
            Columns.User: np.repeat(np.arange(40), 10),
            Columns.Item: random.randint(0, 30, 400),
            Columns.Weight: 1.0,
            Columns.Datetime: pd.date_range("2020-01-01", periods=400, freq="h"),
        }
    )
    data = Dataset.construct(frame)

    def trainer() -> Any:
        return Trainer(max_epochs=2, logger=False, enable_checkpointing=False, **ON_CPU)

    small: dict[str, Any] = {"n_factors": 16, "n_blocks": 1, "n_heads": 2, "batch_size": 8}
    for kind in (SASRecModel, BERT4RecModel):
        model = kind(get_trainer_func=trainer, recommend_torch_device="cpu", **small)
        model.fit(data)
        tell(*sums(model.lightning_model))
        users = np.arange(5)
        tell(model.recommend(users, data, k=3, filter_viewed=True)[Columns.Score].to_numpy())


def deepforest() -> None:
    """A detector of trees, trained and validated on images of its own."""
    import lightning.pytorch as pl
    import numpy as np
    import pandas as pd
    from deepforest import main
    from PIL import Image
    from torchvision.models.detection import retinanet_resnet50_fpn

    pl.seed_everything(0)
    random = np.random.RandomState(0)
    rows = []
    for number in range(4):
        name = f"{number}.png"
        Image.fromarray(random.randint(0, 255, (100, 100, 3), dtype="uint8")).save(name)
        for x, y in ((10, 10), (50, 40)):
            rows.append((name, x, y, x + 30, y + 30, "Tree"))
    names = ["image_path", "xmin", "ymin", "xmax", "ymax", "label"]
    pd.DataFrame(rows, columns=names).to_csv("boxes.csv", index=False)
    part = {"csv_file": "boxes.csv", "root_dir": "."}
    config: dict[str, Any] = {
        "model": {"name": None},
        "train": {**part, "epochs": 1},
        "label_dict": {"Tree": 0},
        "num_classes": 1,
        "validation": {"root_dir": ".", "val_accuracy_interval": 1},
        "workers": 0,
        "batch_size": 2,
        "devices": 1,
        "accelerator": "cpu",
    }
    sizes: dict[str, Any] = {"num_classes": 1, "min_size": 64, "max_size": 128}
    network = retinanet_resnet50_fpn(weights=None, weights_backbone=None, **sizes)
    model = main.deepforest(model=network, config_args=config)
    model.set_labels({"Tree": 0})
    model.config.validation.csv_file = "boxes.csv"
    model.create_trainer(enable_progress_bar=False)
    model.trainer.fit(model)
    tell(*logged(model.trainer), *sums(model))


def careamics() -> None:
    """A network that removes noise, with the library's checkpoints; its predictions."""
    import lightning.pytorch as pl
    import numpy as np
    from careamics import CAREamist
    from careamics.config import create_n2v_configuration

    pl.seed_everything(0)
    # The library makes generators that nothing seeds.
    unseeded = np.random.default_rng
    np.random.default_rng = lambda seed=None: unseeded(0 if seed is None else seed)
    image = np.random.RandomState(0).rand(64, 64).astype("float32")
    config = create_n2v_configuration(
        "x", data_type="array", axes="YX", patch_size=[16, 16], batch_size=4, num_epochs=2
    )
    careamist = CAREamist(source=config, work_dir="work")
    careamist.train(train_source=image, val_source=image[:32, :32])
    tell(*sums(careamist.model))
    tell(np.concatenate([np.ravel(part) for part in careamist.predict(source=image[:32, :32])]))


def timeseries_agent() -> None:
    """An agent that learns by rewards, saved and loaded by the library."""
    import lightning as L
    import numpy as np
    import pandas as pd
    from timeseries_agent import create_agent, create_env, train_agent

    L.seed_everything(0)
    frame = pd.DataFrame({"x": np.sin(np.arange(80) / 5), "y": np.cos(np.arange(80) / 5)})
    env = create_env(frame, ["x", "y"], "x", lookback=4)
    for kind in ("ppo", "reinforce"):
        agent = create_agent(env, agent_type=kind)
        train_agent(agent, env, max_epochs=3, experiment_name=kind, **ON_CPU)
        tell(*sums(agent))


def drvi() -> None:
    """A disentangled variational model on scvi-tools; its latent values."""
    import numpy as np
    import scvi
    from drvi.model import DRVI

    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=60, n_genes=30)
    DRVI.setup_anndata(cells, categorical_covariate_keys=["batch"], is_count_data=True)
    model = DRVI(cells, n_latent=4, encoder_dims=[16], decoder_dims=[16])
    model.train(max_epochs=3, early_stopping=True, check_val_every_n_epoch=1, **ON_CPU)
    tell(*sums(model.module), np.asarray(model.get_latent_representation())[:5])
    tell(*(values.to_numpy() for name, values in sorted(model.history.items())))


def cph_regression() -> None:
    """A regression by the library's command line and YAML file; tested with the best checkpoint."""
    import numpy as np
    import pandas as pd
    from cph_regression.regression.cli import RGSLightningCLI

    random = np.random.RandomState(0)
    table = pd.DataFrame(random.randn(120, 3), columns=list("abc"))
    table["kind"] = random.choice(["x", "y"], 120)
    table["target"] = table.a * 2 + table.b
    table.to_csv("data.csv", index=False)
    name = "cph_regression.regression"
    config = {
        "seed_everything": 0,
        "trainer": {
            **ON_CPU,
            "max_epochs": 3,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"monitor": "val_loss", "filename": "{epoch}-{val_loss:.2f}.best"},
                }
            ],
        },
        "model": {
            "class_path": f"{name}.modelmodule.ModelModuleRGS",
            "init_args": {
                "lr": 0.01,
                "model": {
                    "class_path": f"{name}.modelfactory.RegressionModel",
                    "init_args": {
                        "input_dim": 0,
                        "hidden_layers": [8],
                        "dropout_rates": [0.1],
                    },
                },
            },
        },
        "data": {
            "class_path": f"{name}.datamodule.DataModuleRGS",
            "init_args": {
                "csv_path": "data.csv",
                "batch_size": 16,
                "categorical_cols": ["kind"],
                "numeric_cols": ["a", "b", "c"],
                "save_preprocessor": False,
            },
        },
    }
    Path("config.yaml").write_text(json.dumps(config))  # JSON is YAML
    sys.argv[1:] = ["--config", "config.yaml"]
    cli = RGSLightningCLI(run=False)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    tell(*logged(cli.trainer), *sums(cli.model))
    tell(*cli.trainer.test(datamodule=cli.datamodule, ckpt_path="best")[0].values())


def torchdyn() -> None:
    """A differential equation whose right-hand side is learnt, a LightningModule in another."""
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torchdyn.core import NeuralODE

    pl.seed_everything(0)

    class Learner(pl.LightningModule):  # type: ignore[misc]  # not annotated
        def __init__(self) -> None:
            super().__init__()
            field = torch.nn.Sequential(
                torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
            )
            self.model = NeuralODE(field, sensitivity="adjoint", solver="rk4")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            points, kinds = batch
            _, path = self.model(points, torch.linspace(0, 1, 5))
            loss = torch.nn.functional.cross_entropy(path[-1], kinds)
            self.log("loss", loss, on_epoch=True, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    points = torch.randn(64, 2)
    data = TensorDataset(points, (points.prod(1) > 0).long())
    model = Learner()
    trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, **ON_CPU)
    trainer.fit(model, DataLoader(data, 16, shuffle=True))
    tell(*logged(trainer), *sums(model))


def mlcolvar() -> None:
    """Collective variables of molecules, by a loader of the library's that shuffles anew."""
    import lightning
    import torch
    from mlcolvar.cvs import AutoEncoderCV, DeepTDA, DeepTICA
    from mlcolvar.data import DictDataset, DictModule
    from mlcolvar.utils.timelagged import create_timelagged_dataset
    from mlcolvar.utils.trainer import MetricsCallback

    lightning.seed_everything(0)
    points = torch.randn(160, 4).cumsum(0) / 10
    labelled = DictDataset({"data": points, "labels": (torch.arange(160) >= 80).float()})
    lagged = create_timelagged_dataset(points, lag_time=2)
    models = (
        (AutoEncoderCV([4, 6, 2]), DictDataset({"data": points})),
        (DeepTDA(2, 1, [-5.0, 5.0], [0.2, 0.2], [4, 8, 1]), labelled),
        (DeepTICA([4, 8, 2], n_cvs=1), lagged),
    )
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, **ON_CPU}
    for model, dataset in models:
        data = DictModule(dataset, lengths=[0.7, 0.2, 0.1], batch_size=32)
        metrics = MetricsCallback()
        stopping = lightning.pytorch.callbacks.EarlyStopping("valid_loss", patience=3)
        trainer = lightning.Trainer(max_epochs=4, callbacks=[metrics, stopping], **options)
        trainer.fit(model, data)
        tell(*logged(trainer), *sums(model))
        tell(*(metrics.metrics[name] for name in sorted(metrics.metrics)))
        trainer.test(model, data)
        with torch.no_grad():
            tell(*logged(trainer), model(points))


def write_argon(**counts: int) -> None:
    """Write clusters of argon with their energies and forces, a file for each name."""
    import numpy as np
    from ase import Atoms
    from ase.calculators.lj import LennardJones
    from ase.io import write

    random = np.random.RandomState(0)
    corners = np.array(list(np.ndindex(2, 2, 2)))

    def cluster() -> Any:
        atoms = Atoms("Ar8", positions=corners * 1.2 + random.randn(8, 3) * 0.05)
        atoms.calc = LennardJones(rc=3.0)
        atoms.get_forces()
        return atoms

    for name, count in counts.items():
        write(f"{name}.xyz", [cluster() for _ in range(count)])


def graph_pes() -> None:
    """A potential by the library's training from a config: averaged weights, the best model."""
    import torch
    from graph_pes.models import load_model
    from graph_pes.scripts.train import train_from_config

    write_argon(train=14, valid=6)
    options = {name: value for name, value in ON_CPU.items() if name != "enable_progress_bar"}
    train_from_config(
        {
            "model": {"+SchNet": {"cutoff": 3.0, "channels": 8, "layers": 1}},
            "data": {
                name: {"+file_dataset": {"path": f"{name}.xyz", "cutoff": 3.0}}
                for name in ("train", "valid")
            },
            "loss": ["+PerAtomEnergyLoss()", "+ForceRMSE()"],
            "fitting": {
                "trainer_kwargs": {**options, "max_epochs": 6},
                "swa": {"lr": 0.001, "start": 0.5, "anneal_epochs": 1},
                "early_stopping": {"patience": 4},
                "lr_warmup_steps": 3,
                "loader_kwargs": {"num_workers": 0, "persistent_workers": False, "batch_size": 4},
            },
            "general": {"run_id": "run", "root_dir": ".", "progress": "logged"},
            "wandb": None,
        }
    )
    tell(*sums(load_model("run/model.pt")))
    last = torch.load("run/checkpoints/last.ckpt", weights_only=False)["state_dict"]
    tell(*(value.abs().sum() for _, value in sorted(last.items()) if torch.is_tensor(value)))


def neural_amp_modeler() -> None:
    """The sound of an amplifier, by the library's training and by its checkpoints beside models."""
    import numpy as np
    import pytorch_lightning as pl
    from nam.data import Split, init_dataset, np_to_wav
    from nam.train import full
    from nam.train.core import get_callbacks
    from nam.train.lightning_module import LightningModule
    from torch.utils.data import DataLoader

    random = np.random.RandomState(0)
    sound = random.randn(6000) * 0.2
    np_to_wav(sound, "x.wav")
    np_to_wav(np.tanh(sound * 2) * 0.4, "y.wav")
    layers: dict[str, Any] = {"input_size": 1, "condition_size": 1, "channels": 4, "kernel_size": 3}
    layers["head"] = {"out_channels": 1, "kernel_size": 1, "bias": True}
    layers |= {"dilations": [1, 2, 4], "activation": "Tanh"}
    data = {
        "train": {"stop_samples": 4000, "ny": 200},
        "validation": {"start_samples": 4000, "ny": None, "require_input_pre_silence": None},
        "common": {"x_path": "x.wav", "y_path": "y.wav", "delay": 0},
    }
    model = {
        "net": {
            "name": "WaveNet",
            "config": {"layers_configs": [layers], "head_scale": 0.1},
        },
        "loss": {"val_loss": "esr"},
        "optimizer": {"lr": 0.01},
        "lr_scheduler": {"class": "ExponentialLR", "kwargs": {"gamma": 0.9}},
    }
    learning = {
        "train_dataloader": {"batch_size": 4, "shuffle": True, "drop_last": True},
        "val_dataloader": {},
        "trainer": {**ON_CPU, "max_epochs": 4},
    }
    Path("out").mkdir()
    full.main(data, model, learning, Path("out"), no_show=True, make_plots=False)
    tell(json.loads(Path("out/model.nam").read_text())["weights"])
    pl.seed_everything(0)
    module = LightningModule.init_from_config(model)
    loaders = [
        DataLoader(init_dataset(data, Split.TRAIN), 4, shuffle=True),
        DataLoader(init_dataset(data, Split.VALIDATION)),
    ]
    module.net.sample_rate = 48000
    trainer = pl.Trainer(max_epochs=5, callbacks=get_callbacks(1e-4), **ON_CPU)
    trainer.fit(module, *loaders)
    tell(*logged(trainer), *sums(module))
    for saved in sorted(Path(trainer.checkpoint_callback.dirpath).glob("*.nam")):
        tell(json.loads(saved.read_text())["weights"])


def nequip() -> None:
    """An equivariant potential with an average of its weights; tested.

    The library's script replaces private methods of Lightning's, and is left out.
    """
    import lightning
    from hydra.utils import instantiate
    from nequip.utils.global_state import set_global_state

    set_global_state()
    write_argon(all=20)
    names = ["Ar"]
    transforms = "nequip.data.transforms"
    data = instantiate(
        {
            "_target_": "nequip.data.datamodule.ASEDataModule",
            "seed": 0,
            "split_dataset": {"file_path": "all.xyz", "train": 12, "val": 4, "test": 4},
            "transforms": [
                {
                    "_target_": f"{transforms}.ChemicalSpeciesToAtomTypeMapper",
                    "model_type_names": names,
                },
                {"_target_": f"{transforms}.NeighborListTransform", "r_max": 3.0},
            ],
            "train_dataloader": {"batch_size": 4, "shuffle": True},
            "val_dataloader": {"batch_size": 4},
            "test_dataloader": {"batch_size": 4},
        },
        _recursive_=False,
    )
    metrics = {"_target_": "nequip.train.EnergyForceMetrics"}
    module = instantiate(
        {
            "_target_": "nequip.train.EMALightningModule",
            "ema_decay": 0.9,
            "loss": {"_target_": "nequip.train.EnergyForceLoss"},
            "val_metrics": metrics,
            "test_metrics": metrics,
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
            "model": {
                "_target_": "nequip.model.NequIPGNNModel",
                "seed": 0,
                "model_dtype": "float32",
                "type_names": names,
                "r_max": 3.0,
                "num_layers": 2,
                "num_features": 4,
                "radial_mlp_width": 8,
                "avg_num_neighbors": 7.0,
            },
            "num_datasets": data.num_datasets,
        },
        _recursive_=False,
        _convert_="all",
    )
    saver = lightning.pytorch.callbacks.ModelCheckpoint(monitor="val0_epoch/weighted_sum")
    options: dict[str, Any] = {"inference_mode": False, "callbacks": [saver], **ON_CPU}
    trainer = lightning.Trainer(max_epochs=3, **options)
    trainer.fit(module, datamodule=data)
    tell(*logged(trainer), *sums(module), saver.best_model_score)
    trainer.test(module, datamodule=data, ckpt_path="best", weights_only=False)
    tell(*logged(trainer))


def litgpt() -> None:
    """A language model by the library's pretraining on Fabric, with validation."""
    import torch
    from litgpt import Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader

    class Tokens(DataModule):  # type: ignore[misc]  # not annotated
        def connect(self, batch_size: int, max_seq_length: int, **_: Any) -> None:
            self.batch_size, self.length = batch_size, max_seq_length

        def train_dataloader(self) -> Any:
            numbers = torch.arange(64)[:, None] + torch.arange(self.length + 1) ** 2
            return DataLoader(numbers % 50, self.batch_size, shuffle=True)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile leaves the model as it is
    small = Config(block_size=16, n_layer=2, n_embd=16, n_head=2, padded_vocab_size=50)
    options: dict[str, Any] = {"model_config": small, "logger_name": "csv", "devices": RANKS}
    options |= {"precision": "32-true", "eval": EvalArgs(interval=2, max_iters=2)}
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "max_tokens": 6 * 8 * 16}
    train = TrainArgs(save_interval=4, lr_warmup_steps=2, max_norm=1.0, **sizes)
    setup("small", out_dir=Path("out"), data=Tokens(), train=train, **options)
    saved = torch.load("out/final/lit_model.pth", weights_only=False)["model"]
    tell(*(values.abs().sum() for _, values in sorted(saved.items())))
    for file in sorted(Path("out").rglob("metrics.csv")):
        rows = list(csv.DictReader(file.open()))
        told = [row[name] for row in rows for name in ("step", "loss", "val_loss")]
        tell([float(value) for value in told if value])


def logging_model(BoringModel: Any) -> Any:
    """Return a model that logs values of steps, of epochs and of both, and its hyperparameters."""
    import torch

    class Model(BoringModel):  # type: ignore[misc]  # not annotated
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(batch)
            self.log("step_only", loss)
            self.log("both", loss, on_epoch=True, on_step=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.step(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.step(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    return Model()


def dvclive() -> None:
    """The library's logger, which keeps checkpoints too; what it wrote is read."""
    import lightning.pytorch as pl
    from dvclive.lightning import DVCLiveLogger
    from lightning.pytorch.demos.boring_classes import BoringModel

    pl.seed_everything(0)
    model = logging_model(BoringModel)
    saver = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2)
    live = DVCLiveLogger(log_model="all", save_dvc_exp=False, dvcyaml=None, report=None)
    options: dict[str, Any] = {"logger": live, "log_every_n_steps": 5, "callbacks": [saver]}
    trainer = pl.Trainer(max_epochs=3, limit_train_batches=12, **options, **ON_CPU)
    trainer.fit(model)
    trainer.test(model)
    tell(*sums(model))
    for file in sorted(Path("dvclive/plots/metrics").rglob("*.tsv")):
        rows = list(csv.DictReader(file.open(), delimiter="\t"))
        tell([[float(row["step"]), float(row[file.stem])] for row in rows])
    last = json.loads(Path("dvclive/metrics.json").read_text())
    tell(last["step"], len(list(Path(saver.dirpath).iterdir())))


def mlflow() -> None:
    """The library's automatic logging of a fit and a test, with its checkpoints; loaded again."""
    import mlflow as library
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel

    pl.seed_everything(0)
    library.set_tracking_uri("sqlite:///runs.db")
    library.pytorch.autolog(log_every_n_step=4, checkpoint_monitor="val_loss")
    model = logging_model(BoringModel)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, **ON_CPU}
    trainer = pl.Trainer(max_epochs=3, limit_train_batches=12, **options)
    with library.start_run() as run:
        trainer.fit(model)
        trainer.test(model)
    client = library.MlflowClient()
    told = client.get_run(run.info.run_id).data
    for name in sorted(told.metrics):
        history = client.get_metric_history(run.info.run_id, name)
        tell([[value.step, value.value] for value in history])
    tell(*(float(told.params[name]) for name in ("epochs", "lr")))
    checkpoint = library.pytorch.load_checkpoint(type(model), run.info.run_id)
    tell(*sums(checkpoint))


def cellarium_ml() -> None:
    """Cells by two models whose methods are hooks; predictions.

    Models without an optimizer of their own step Lightning's stand-in for one, and are left out.
    """
    import lightning.pytorch as pl
    import numpy as np
    import torch
    from anndata import AnnData
    from cellarium.ml import CellariumAnnDataDataModule, CellariumModule
    from cellarium.ml.callbacks import PredictionWriter
    from cellarium.ml.models import LogisticRegression, ProbabilisticPCA
    from cellarium.ml.utilities.data import AnnDataField, categories_to_codes, get_categories

    pl.seed_everything(0)
    random = np.random.RandomState(0)
    cells = AnnData(random.rand(80, 5).astype("float32"))
    cells.obs["kind"] = random.choice(list("xy"), 80)
    cells.obs["kind"] = cells.obs["kind"].astype("category")
    names = cells.var_names.to_numpy()
    keys = {
        "x_ng": AnnDataField("X"),
        "var_names_g": AnnDataField("var_names"),
        "obs_names_n": AnnDataField("obs_names"),
        "y_n": AnnDataField("obs", key="kind", convert_fn=categories_to_codes),
        "y_categories": AnnDataField("obs", key="kind", convert_fn=get_categories),
    }
    learns: dict[str, Any] = {"optim_fn": torch.optim.Adam, "optim_kwargs": {"lr": 0.1}}
    for model in (
        LogisticRegression(80, names, np.array(["x", "y"]), log_metrics=False),
        ProbabilisticPCA(80, names, n_components=2, ppca_flavor="marginalized"),
    ):
        data = CellariumAnnDataDataModule(cells, batch_keys=keys, batch_size=16, shuffle=True)
        module = CellariumModule(model=model, **learns)
        writer = PredictionWriter("predictions")
        # The library's loader of validation data is empty, which is refused here.
        options: dict[str, Any] = {"limit_val_batches": 0, "callbacks": [writer], **ON_CPU}
        trainer = pl.Trainer(max_epochs=3, logger=False, **options)
        trainer.fit(module, data)
        tell(*logged(trainer), *sums(module))
    trainer.predict(module, data, return_predictions=False)
    for file in sorted(Path("predictions").iterdir()):
        tell(np.loadtxt(file, delimiter=","))


def replay() -> None:
    """A transformer that recommends, by the library's module and callbacks; tested."""
    import lightning
    import torch
    from replay.data import FeatureHint, FeatureSource, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
    from replay.nn.lightning import LightningModule
    from replay.nn.lightning.callback import ComputeMetricsCallback, TorchTopItemsCallback
    from replay.nn.lightning.optimizer import OptimizerFactory
    from replay.nn.lightning.scheduler import LRSchedulerFactory
    from replay.nn.sequential import SasRec
    from torch.utils.data import DataLoader

    lightning.seed_everything(0)
    items, length = 20, 6
    feature = TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=FeatureType.CATEGORICAL,
        embedding_dim=8,
        padding_value=items,
        cardinality=items,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )

    def sample(number: int) -> dict[str, Any]:
        steps = (torch.arange(length + 1) * (1 + number % 3) + number) % items
        whole = torch.ones(length, dtype=torch.bool)
        return {
            "feature_tensors": {"item_id": steps[:-1]},
            "padding_mask": whole,
            "positive_labels": steps[1:, None],
            "target_padding_mask": whole[:, None],
            "ground_truth": steps[-1:],
            "query_id": torch.tensor(number),
        }

    samples: Any = [sample(number) for number in range(48)]
    held_back = [DataLoader(samples[32:40], 8), DataLoader(samples[40:], 8)]
    network = SasRec.from_params(
        TensorSchema([feature]), embedding_dim=8, num_heads=2, num_blocks=1, max_sequence_length=6
    )
    model = LightningModule(network, OptimizerFactory(), LRSchedulerFactory(decay_step=1))
    metrics = ComputeMetricsCallback(ks=[1, 5], item_count=items)
    top = TorchTopItemsCallback(3, "query_id")
    options: dict[str, Any] = {"callbacks": [metrics, top], "logger": False, **ON_CPU}
    trainer = lightning.Trainer(max_epochs=3, **options)
    trainer.fit(model, DataLoader(samples[:32], 8, shuffle=True), held_back)
    tell(*logged(trainer), *sums(model))
    for told in metrics.get_metrics().values():
        tell(*(told[name] for name in sorted(told)))
    trainer.test(model, held_back)
    tell(*logged(trainer))
    trainer.predict(model, held_back[0], return_predictions=False)
    tell(*top.get_result())


def kaiko_eva() -> None:
    """Two runs of a head on features, by the library's session and its Trainer's copies."""
    import lightning.pytorch as pl
    import torch
    from eva.core.data import dataloaders, datamodules, datasets
    from eva.core.metrics import MulticlassClassificationMetrics
    from eva.core.metrics.structs import MetricsSchema
    from eva.core.models import HeadModule
    from eva.core.trainers import Trainer
    from torch import nn

    pl.seed_everything(0)

    class Points(datasets.TorchDataset):  # type: ignore[misc]  # not annotated
        def __init__(self, count: int) -> None:
            self.points = torch.randn(count, 4)
            self.kinds = (self.points[:, 0] > 0).long() + (self.points[:, 1] > 0).long()

        def __len__(self) -> int:
            return len(self.points)

        def __getitem__(self, index: int) -> Any:
            return self.points[index], self.kinds[index], {}

    def loader(*, shuffle: bool = False) -> Any:
        options = {"pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        return dataloaders.DataLoader(16, shuffle=shuffle, num_workers=0, **options)

    data = datamodules.DataModule(
        datamodules.DatasetsSchema(train=Points(64), val=Points(32), test=Points(32)),
        datamodules.DataloadersSchema(train=loader(shuffle=True), val=loader(), test=loader()),
    )
    model = HeadModule(
        head=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)),
        criterion=nn.CrossEntropyLoss(),
        metrics=MetricsSchema(common=MulticlassClassificationMetrics(num_classes=3)),
    )
    saver = pl.callbacks.ModelCheckpoint(monitor="val/MulticlassAccuracy", mode="max")
    options: dict[str, Any] = {"callbacks": [saver], "logger": pl.loggers.CSVLogger("logs")}
    trainer = Trainer(max_epochs=3, n_runs=2, **options, **ON_CPU)
    trainer.run_evaluation_session(model, data)
    (file,) = Path("logs").rglob("results.json")
    results = json.loads(file.read_text())["metrics"]
    for stage in ("val", "test"):
        for told in results[stage]:
            tell(*([*told[name]["values"], told[name]["mean"]] for name in sorted(told)))
    for file in sorted(Path("logs").rglob("*.ckpt")):
        weights = torch.load(file, weights_only=False)["state_dict"]
        tell(*(values.abs().sum() for _, values in sorted(weights.items())))


def lightning_ir() -> None:
    """A bi-encoder of a small BERT that ranks documents, with the library's schedule."""
    import torch
    from lightning.pytorch import seed_everything
    from lightning_ir import (
        BiEncoderModule,
        InBatchCrossEntropy,
        LightningIRTrainer,
        RankNet,
        TrainBatch,
    )
    from lightning_ir.models import DprConfig
    from torch.utils.data import DataLoader
    from transformers import BertConfig, BertModel, BertTokenizerFast

    seed_everything(0)
    words = [f"w{number}" for number in range(40)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    Path("vocab.txt").write_text("\n".join([*special, *words]))
    BertTokenizerFast("vocab.txt").save_pretrained("bert")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=45, intermediate_size=16, **small)).save_pretrained("bert")
    module = BiEncoderModule(
        "bert",
        config=DprConfig(projection=None),
        loss_functions=[InBatchCrossEntropy(), (RankNet(), 0.5)],
        evaluation_metrics=["nDCG@10"],
    )
    module.set_optimizer(torch.optim.AdamW, lr=0.01)

    def batch(numbers: list[int]) -> Any:
        texts = [[f"w{n} w{n + 1}", f"w{n + 9} w{n + 7}"] for n in numbers]
        return TrainBatch(
            queries=[f"w{n} w{n + 2}" for n in numbers],
            docs=texts,
            query_ids=[str(n) for n in numbers],
            doc_ids=[[f"{n}-0", f"{n}-1"] for n in numbers],
            qrels=[{"query_id": str(n), "doc_id": f"{n}-0", "relevance": 1} for n in numbers],
            targets=torch.tensor([[1.0, 0.0] for _ in numbers]),
        )

    class Numbers(list):  # type: ignore[type-arg]
        dataset_id, run_path = "numbers", None

    numbers, held_back_numbers = (cast(Any, Numbers(range(count))) for count in (24, 8))
    train = DataLoader(numbers, 8, shuffle=True, collate_fn=batch)
    held_back = DataLoader(held_back_numbers, 4, collate_fn=batch)
    trainer = LightningIRTrainer(max_epochs=3, logger=False, **ON_CPU)
    trainer.fit(module, train, held_back)
    tell(*logged(trainer), *sums(module))
    trainer.test(module, held_back)
    tell(*logged(trainer))


LIBRARIES: dict[str, Callable[[], None]] = {
    "neuralforecast": neuralforecast,
    "gluonts[torch]": gluonts,
    "scvi-tools": scvi_tools,
    "pytorch-tabular": pytorch_tabular,
    "chemprop": chemprop,
    "u8darts[torch]": darts,
    "anomalib": anomalib,
    "torch_geometric": torch_geometric,
    "lightly": lightly,
    "pytabkit[models]": pytabkit,
    "pina-mathlab": pina,
    "pytorch-lifestream": pytorch_lifestream,
    "rl4co": rl4co,
    "torchgeo": torchgeo,
    "pytorch-forecasting": pytorch_forecasting,
    "optuna-integration[pytorch_lightning]": optuna_integration,
    "contextualized-ml": contextualized,
    "deeptab": deeptab,
    "ts3l": ts3l,
    "prototorch-models": prototorch,
    "disent": disent,
    "swyft": swyft,
    "tensorneko": tensorneko,
    "neuralprophet": neuralprophet,
    "torchphysics": torchphysics,
    "neuromancer": neuromancer,
    "rectools[torch]": rectools,
    "deepforest": deepforest,
    "careamics": careamics,
    "timeseries-agent": timeseries_agent,
    "drvi-py": drvi,
    "cph-regression": cph_regression,
    "torchdyn": torchdyn,
    "mlcolvar": mlcolvar,
    "graph-pes": graph_pes,
    "neural-amp-modeler": neural_amp_modeler,
    "nequip": nequip,
    "litgpt": litgpt,
    "dvclive": dvclive,
    "mlflow": mlflow,
    "cellarium-ml": cellarium_ml,
    "replay-rec": replay,
    "kaiko-eva": kaiko_eva,
    "lightning-ir": lightning_ir,
}
"""By the names that they are installed by."""


def numbers_of(*command: str) -> list[float]:
    """Run this file in an empty folder, and return the numbers that it tells."""
    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, *command, here, *sys.argv[1:]]
        done = subprocess.run(
            program, cwd=folder, env={**os.environ, "RUN": "1"}, text=True, stdout=subprocess.PIPE
        )
    if done.returncode:
        sys.exit(f"{' '.join(program)} failed\n{done.stdout}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [number for line in lines for number in json.loads(line.removeprefix(MARK))]


def same(one: float, other: float, *, tolerance: float) -> bool:
    """Return whether two numbers are as good as equal, or neither is one."""
    return math.isclose(one, other, abs_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def main() -> None:
    """Run a library's models, or compare two runs of them."""
    library = LIBRARIES[sys.argv[1]]
    if os.environ.get("RUN"):
        warnings.filterwarnings("ignore")
        library()
        return
    theirs, ours = numbers_of(), numbers_of("-m", "stratagem", "run", "--as-lightning")
    if len(theirs) != len(ours):
        sys.exit(f"{sys.argv[1]}: {len(theirs)} numbers with Lightning, {len(ours)} with Stratagem")
    largest = max(map(abs, theirs))
    pairs = enumerate(zip(theirs, ours, strict=True))
    other = [(i, a, b) for i, (a, b) in pairs if not same(a, b, tolerance=1e-5 * largest)]
    if other:
        lines = [f"number {i}: {a} with Lightning, {b} with Stratagem" for i, a, b in other[:10]]
        sys.exit("\n".join([f"{sys.argv[1]}: {len(other)} of {len(ours)} numbers differ", *lines]))
    print(f"{sys.argv[1]}: {len(ours)} numbers are the same")


if __name__ == "__main__":
    main()
