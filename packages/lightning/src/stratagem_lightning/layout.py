"""Which names Lightning's public modules have, and which object of Stratagem each of them is."""

from __future__ import annotations

from collections.abc import Mapping

_API = "stratagem_lightning.api"
_HELPERS = f"{_API}.utilities"


def _names(homes: Mapping[str, str]) -> dict[str, str]:
    """Return names with their places.

    Args:
        homes: module -> names that it holds; `name=other` where it calls it `other`.
    """
    places = {}
    for home, names in homes.items():
        for name in names.split():
            own, _, other = name.partition("=")
            places[own] = f"{home}:{other or own}"
    return places


_CALLBACKS = _names(
    {
        "stratagem.callbacks": "BackboneFinetuning BaseFinetuning Callback "
        "DeviceStatsMonitor "
        "LambdaCallback LearningRateMonitor ModelSummary "
        "OnExceptionCheckpoint RichModelSummary=ModelSummary "
        "ThroughputMonitor WeightAveraging",
        f"{_API}.callbacks.stochastic_weight_averaging": "StochasticWeightAveraging",
        f"{_API}.callbacks.accumulation": "GradientAccumulationScheduler",
        f"{_API}.callbacks.pruning": "ModelPruning",
        f"{_API}.callbacks.timer": "Timer",
        f"{_API}.callbacks.weight_averaging": "EMAWeightAveraging",
        f"{_API}.callbacks.prediction_writer": "BasePredictionWriter",
        f"{_API}.callbacks.progress": "ProgressBar",
        f"{_API}.callbacks.tqdm_bar": "TQDMProgressBar",
        f"{_API}.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason",
        f"{_API}.callbacks.rich_bar": "RichProgressBar",
        f"{_API}.callbacks.model_checkpoint": "ModelCheckpoint",
        f"{_API}.callbacks.finders": "BatchSizeFinder",
        "stratagem_extras.tuner": "LearningRateFinder",
        f"{_API}.callbacks.checkpoint": "Checkpoint",
        f"{_API}.placeholders": "SpikeDetection",
    }
)
_LOGGERS = _names(
    {
        "stratagem.loggers": "Logger NeptuneLogger",
        f"{_API}.placeholders": "LitLogger",
        f"{_API}.loggers": "CSVLogger CometLogger DummyLogger ExperimentWriter MLFlowLogger "
        "TensorBoardLogger WandbLogger rank_zero_experiment",
        "stratagem_extras.loggers.sdk_logger": "DummyExperiment",
    }
)
_TRAINER_LOGGERS = {**_LOGGERS, **_names({f"{_API}.loggers": "Logger"})}
_DUMMY = _names({"stratagem_extras.loggers.sdk_logger": "_DummyExperiment=DummyExperiment"})
_LOGGER_LEAVES = {
    "csv_logs": "CSVLogger ExperimentWriter",
    "logger": "Logger DummyExperiment DummyLogger rank_zero_experiment",
    "tensorboard": "TensorBoardLogger",
}
_FURTHER_LOGGERS = {
    "comet": "CometLogger",
    "mlflow": "MLFlowLogger",
    "neptune": "NeptuneLogger",
    "wandb": "WandbLogger",
}
_CLI = _names(
    {
        f"{_API}.cli": "ArgsType LRSchedulerCallable LRSchedulerType LRSchedulerTypeTuple "
        "LRSchedulerTypeUnion LightningArgumentParser LightningCLI OptimizerCallable "
        "ReduceLROnPlateau SaveConfigCallback _JSONARGPARSE_SIGNATURES_AVAILABLE "
        "instantiate_class",
        "jsonargparse": "Namespace",
    }
)
_PROGRESS = _names(
    {
        f"{_API}.callbacks.progress": "ProgressBar get_standard_metrics",
        f"{_API}.callbacks.tqdm_bar": "TQDMProgressBar Tqdm",
        f"{_API}.callbacks.rich_bar": "RichProgressBar RichProgressBarTheme",
    }
)
_PROFILERS = _names(
    {
        "stratagem.profilers": "PassThroughProfiler Profiler",
        f"{_API}.profilers": "AdvancedProfiler PyTorchProfiler SimpleProfiler",
        f"{_API}.placeholders": "XLAProfiler",
    }
)
_STRATEGIES = _names(
    {
        f"{_API}.strategies.ddp": "DDPStrategy",
        "stratagem.strategies": "DeepSpeedStrategy HPUParallelStrategy "
        "ParallelStrategy SingleDeviceStrategy SingleHPUStrategy "
        "SingleDeviceXLAStrategy=SingleXLAStrategy Strategy "
        "XLAFSDPStrategy XLAStrategy StrategyRegistry STRATEGY_REGISTRY=StrategyRegistry "
        "DataParallelStrategy",
        f"{_API}.strategies.fsdp": "FSDPStrategy",
        f"{_API}.strategies.model_parallel": "ModelParallelStrategy",
        f"{_API}.tpu": "SingleTPUStrategy",
    }
)
_FABRIC_STRATEGIES = {
    **_STRATEGIES,
    **_names(
        {
            f"{_API}.strategies.single_device": "SingleDeviceStrategy",
            f"{_API}.strategies.sharding": "FSDPStrategy ModelParallelStrategy",
        }
    ),
}
_ACCELERATORS = _names(
    {
        "stratagem.accelerators": "HPUAccelerator XLAAccelerator",
        f"{_API}.tpu": "TPUAccelerator",
        f"{_API}.accelerators.cuda": "CUDAAccelerator",
        f"{_API}.accelerators.mps": "MPSAccelerator",
        f"{_API}.accelerators.accelerator": "Accelerator AcceleratorRegistry "
        "ACCELERATOR_REGISTRY=AcceleratorRegistry CPUAccelerator find_usable_cuda_devices",
    }
)
_PRECISION = _names(
    {
        "stratagem.precision": "BitsandbytesPrecision TransformerEnginePrecision "
        "BitsandbytesPrecisionPlugin=BitsandbytesPrecision "
        "TransformerEnginePrecisionPlugin=TransformerEnginePrecision",
        f"{_API}.placeholders": "HPUPrecisionPlugin",
        f"{_API}.plugins.precision": "DeepSpeedPrecision DeepSpeedPrecisionPlugin "
        "DoublePrecision DoublePrecisionPlugin FSDPPrecision LightningDoublePrecisionModule "
        "FSDPPrecisionPlugin HalfPrecision HalfPrecisionPlugin "
        "FSDPMixedPrecisionPlugin MixedPrecision MixedPrecisionPlugin Precision PrecisionPlugin "
        "TPUBf16Precision TPUBf16PrecisionPlugin TPUPrecision TPUPrecisionPlugin XLABf16Precision "
        "XLABf16PrecisionPlugin XLAPrecision XLAPrecisionPlugin",
    }
)
_ENVIRONMENTS = _names(
    {
        "stratagem.environments": "ClusterEnvironment",
        f"{_API}.plugins.environments": "KubeflowEnvironment LSFEnvironment LightningEnvironment "
        "MPIEnvironment SLURMEnvironment TorchElasticEnvironment",
    }
)
_IO = _names(
    {
        "stratagem.checkpoint": "CheckpointIO TorchCheckpointIO=SingleFileCheckpointIO",
        f"{_API}.plugins.checkpoint_io": "AsyncCheckpointIO",
        f"{_API}.placeholders": "HPUCheckpointIO XLACheckpointIO",
    }
)
_RANK_ZERO = _names(
    {
        "stratagem.launch": "rank_zero_debug rank_zero_info rank_zero_only rank_zero_warn",
        f"{_HELPERS}.warnings": "LightningDeprecationWarning rank_zero_deprecation WarningCache "
        "rank_prefixed_message",
    }
)
_SEED = _names(
    {f"{_HELPERS}.seed": "isolate_rng pl_worker_init_function reset_seed seed_everything"}
)
_EXCEPTIONS = _names({f"{_HELPERS}.exceptions": "MisconfigurationException SIGTERMException"})
_WARNINGS = _names({f"{_HELPERS}.warnings": "PossibleUserWarning disable_possible_user_warnings"})
_DATA = _names(
    {
        f"{_HELPERS}.data": "AttributeDict extract_batch_size has_iterable_dataset has_len "
        "has_len_all_ranks sized_len suggested_max_num_workers"
    }
)
_MOVING = _names(
    {f"{_HELPERS}.data": "convert_tensors_to_scalars convert_to_tensors move_data_to_device"}
)
_MODELS = _names(
    {
        f"{_HELPERS}.models": "find_shared_parameters from_compiled get_torchvision_model "
        "grad_norm is_overridden set_shared_parameters to_uncompiled"
    }
)
_MEMORY = _names(
    {
        f"{_HELPERS}.memory": "garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu "
        "is_oom_error is_out_of_cpu_memory recursive_detach"
    }
)
_PARSING = _names(
    {
        f"{_HELPERS}.data": "AttributeDict",
        f"{_HELPERS}.parsing": "clean_namespace collect_init_args get_init_args is_picklable "
        "lightning_getattr lightning_hasattr lightning_setattr parse_class_init_keys",
    }
)
_ENUMS = _names({f"{_API}.core.states": "GradClipAlgorithmType LightningEnum"})
_THROUGHPUT = _names(
    {
        f"{_API}.callbacks.throughput": "Throughput ThroughputMonitor measure_flops",
    }
)
_SUMMARY = _names(
    {
        f"{_API}.callbacks.summary": "LEFTOVER_PARAMS_NAME ModelSummary NOT_APPLICABLE "
        "PARAMETER_NUM_UNITS UNKNOWN_SIZE get_human_readable_count summarize"
    }
)
_COMBINED = _names({"stratagem.data": "CombinedLoader"})
_TYPES = _names(
    {
        f"{_HELPERS}.types": "EVAL_DATALOADERS LRSchedulerConfig LRSchedulerConfigType "
        "LRSchedulerPLType LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerConfig "
        "OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS "
        "_EVALUATE_OUTPUT=EVALUATE_OUTPUT _PREDICT_OUTPUT=PREDICT_OUTPUT"
    }
)
_BORING = _names(
    {
        f"{_API}.demos.boring_classes": "BoringDataModule BoringDataModuleNoLen "
        "BoringModel DemoModel IterableBoringDataModule ManualOptimBoringModel Net RandomDataset "
        "RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen"
    }
)
_TRANSFORMER = _names({f"{_API}.demos.transformer": "LightningTransformer Transformer WikiText2"})
_LSTM = _names({f"{_API}.demos.lstm": "LightningLSTM SequenceSampler SimpleLSTM"})
_MODULES = _names(
    {f"{_API}.core.module": "LightningModule", f"{_API}.core.datamodule": "LightningDataModule"}
)
_MIXINS = _names({f"{_API}.core.hparams": "HyperparametersMixin"})
_TRAINER = _names({f"{_API}.trainer": "Trainer"})
_TUNER = _names({f"{_API}.tuner": "Tuner"})
_FABRIC = _names({f"{_API}.fabric": "Fabric is_wrapped"})
_CALLBACK = {"Callback": _CALLBACKS["Callback"]}
_SEED_EVERYTHING = {"seed_everything": _SEED["seed_everything"]}
_MIGRATION = _names({f"{_HELPERS}.migration": "migrate_checkpoint pl_legacy_patch"})
_VERSION = {"__version__": f"{_HELPERS}.version:LIGHTNING_VERSION"}
_UTILITIES = {**_DATA, **_MOVING, **_RANK_ZERO, **_WARNINGS, **_ENUMS, **_THROUGHPUT}


def _some(whole: Mapping[str, str], names: str) -> dict[str, str]:
    return {name: whole[name] for name in names.split()}


def _package(name: str, whole: Mapping[str, str], leaves: Mapping[str, str]) -> _Layout:
    """Return a package, and the modules in it that have some of its names.

    Args:
        name: the name of the package.
        whole: the names of the package.
        leaves: for some modules, a part of their names.
    """
    return {name: whole, **{f"{name}.{leaf}": _some(whole, of) for leaf, of in leaves.items()}}


_Layout = dict[str, Mapping[str, str]]

_PRECISION_LEAVES = {
    "amp": "MixedPrecision MixedPrecisionPlugin",
    "deepspeed": "DeepSpeedPrecision DeepSpeedPrecisionPlugin",
    "bitsandbytes": "BitsandbytesPrecision BitsandbytesPrecisionPlugin",
    "double": "DoublePrecision DoublePrecisionPlugin LightningDoublePrecisionModule",
    "fsdp": "FSDPMixedPrecisionPlugin FSDPPrecision FSDPPrecisionPlugin",
    "half": "HalfPrecision HalfPrecisionPlugin",
    "hpu": "HPUPrecisionPlugin",
    "precision": "Precision PrecisionPlugin",
    "precision_plugin": "PrecisionPlugin",
    "tpu": "TPUPrecision TPUPrecisionPlugin",
    "tpu_bf16": "TPUBf16Precision TPUBf16PrecisionPlugin",
    "transformer_engine": "TransformerEnginePrecision TransformerEnginePrecisionPlugin",
    "xla": "XLAPrecision XLAPrecisionPlugin",
    "xlabf16": "XLABf16Precision XLABf16PrecisionPlugin",
}
_STRATEGY_LEAVES = {
    "ddp": "DDPStrategy",
    "deepspeed": "DeepSpeedStrategy",
    "fsdp": "FSDPStrategy",
    "hpu_parallel": "HPUParallelStrategy",
    "model_parallel": "ModelParallelStrategy",
    "parallel": "ParallelStrategy",
    "single_device": "SingleDeviceStrategy",
    "single_hpu": "SingleHPUStrategy",
    "single_tpu": "SingleTPUStrategy",
    "single_xla": "SingleDeviceXLAStrategy",
    "strategy": "Strategy",
    "xla": "XLAStrategy",
    "xla_fsdp": "XLAFSDPStrategy",
}
_ACCELERATOR_LEAVES = {
    "accelerator": "Accelerator",
    "cpu": "CPUAccelerator",
    "cuda": "CUDAAccelerator find_usable_cuda_devices",
    "hpu": "HPUAccelerator",
    "mps": "MPSAccelerator",
    "tpu": "TPUAccelerator",
    "xla": "XLAAccelerator",
}
_ENVIRONMENT_LEAVES = {
    "cluster_environment": "ClusterEnvironment",
    "kubeflow": "KubeflowEnvironment",
    "lightning": "LightningEnvironment",
    "lsf": "LSFEnvironment",
    "mpi": "MPIEnvironment",
    "slurm": "SLURMEnvironment",
    "torchelastic": "TorchElasticEnvironment",
}
_PLUGINS = {**_PRECISION, **_IO}
_LAYER_SYNC = _names({f"{_API}.plugins.layer_sync": "LayerSync TorchSyncBatchNorm"})
_COLLECTIVES = _names(
    {
        f"{_API}.placeholders": "Collective",
        f"{_API}.plugins.collectives": "SingleDeviceCollective TorchCollective",
    }
)
_COLUMNS = _names(
    {
        f"{_API}.placeholders": "BatchesProcessedColumn CustomProgress CustomTimeColumn "
        "MetricsTextColumn ProcessingSpeedColumn"
    }
)
_SERVE = _names({f"{_API}.placeholders": "ServableModule ServableModuleValidator"})

_LOOPS = _names(
    {
        f"{_API}.core.loops": "_EvaluationLoop=EvaluationLoop _FitLoop=FitLoop "
        "_PredictionLoop=PredictionLoop _TrainingEpochLoop=EpochLoop"
    }
)
_LAUNCHERS = _names(
    {
        f"{_API}.strategies.launchers": "_MultiProcessingLauncher=ProcessesLauncher "
        "_SubprocessScriptLauncher=ScriptLauncher"
    }
)

_PYTORCH: _Layout = {
    "pytorch": {
        **_TRAINER,
        **_MODULES,
        **_CALLBACK,
        **_SEED_EVERYTHING,
        **_VERSION,
        **_names({f"{_HELPERS}.version": "cli_lightning_logo"}),
    },
    **_package(
        "pytorch.callbacks",
        _CALLBACKS,
        {
            "batch_size_finder": "BatchSizeFinder",
            "callback": "Callback",
            "checkpoint": "Checkpoint",
            "device_stats_monitor": "DeviceStatsMonitor",
            "early_stopping": "EarlyStopping EarlyStoppingReason",
            "finetuning": "BackboneFinetuning BaseFinetuning",
            "gradient_accumulation_scheduler": "GradientAccumulationScheduler",
            "lambda_function": "LambdaCallback",
            "lr_finder": "LearningRateFinder",
            "lr_monitor": "LearningRateMonitor",
            "model_checkpoint": "ModelCheckpoint",
            "model_summary": "ModelSummary",
            "on_exception_checkpoint": "OnExceptionCheckpoint",
            "progress": "ProgressBar RichProgressBar TQDMProgressBar",
            "pruning": "ModelPruning",
            "rich_model_summary": "RichModelSummary",
            "spike": "SpikeDetection",
            "stochastic_weight_avg": "StochasticWeightAveraging",
            "throughput_monitor": "ThroughputMonitor",
            "weight_averaging": "EMAWeightAveraging WeightAveraging",
        },
    ),
    "pytorch.callbacks.prediction_writer": {
        "BasePredictionWriter": _CALLBACKS["BasePredictionWriter"],
        **_names({f"{_API}.core.states": "WriteInterval"}),
    },
    "pytorch.callbacks.timer": {
        "Timer": _CALLBACKS["Timer"],
        **_names({f"{_API}.core.states": "Interval"}),
    },
    **_package("pytorch.loggers", _TRAINER_LOGGERS, {**_LOGGER_LEAVES, **_FURTHER_LOGGERS}),
    "pytorch.loggers.logger": {**_some(_TRAINER_LOGGERS, _LOGGER_LEAVES["logger"]), **_DUMMY},
    "pytorch.loggers.utilities": _names(
        {f"{_HELPERS}.logging": "_scan_checkpoints=scan_checkpoints _version=version_of"}
    ),
    "pytorch.cli": _CLI,
    "pytorch.callbacks.progress.progress_bar": _some(_PROGRESS, "ProgressBar get_standard_metrics"),
    "pytorch.callbacks.progress.rich_progress": {
        **_some(_PROGRESS, "RichProgressBar RichProgressBarTheme"),
        **_COLUMNS,
    },
    "pytorch.callbacks.progress.tqdm_progress": _some(_PROGRESS, "TQDMProgressBar Tqdm"),
    **_package(
        "pytorch.profilers",
        _PROFILERS,
        {
            "advanced": "AdvancedProfiler",
            "base": "PassThroughProfiler",
            "profiler": "Profiler",
            "pytorch": "PyTorchProfiler",
            "simple": "SimpleProfiler",
            "xla": "XLAProfiler",
        },
    ),
    **_package("pytorch.strategies", _STRATEGIES, _STRATEGY_LEAVES),
    **_package("pytorch.accelerators", _ACCELERATORS, _ACCELERATOR_LEAVES),
    "pytorch.plugins": {
        **_PLUGINS,
        **_LAYER_SYNC,
        **_names({f"{_HELPERS}.types": "_PLUGIN_INPUT=PLUGIN"}),
    },
    "pytorch.plugins.layer_sync": _LAYER_SYNC,
    **_package(
        "pytorch.serve",
        _SERVE,
        {
            "servable_module": "ServableModule",
            "servable_module_validator": "ServableModuleValidator",
        },
    ),
    **_package("pytorch.plugins.precision", _PRECISION, _PRECISION_LEAVES),
    **_package("pytorch.plugins.environments", _ENVIRONMENTS, _ENVIRONMENT_LEAVES),
    **_package(
        "pytorch.plugins.io",
        _IO,
        {
            "async_plugin": "AsyncCheckpointIO",
            "checkpoint_plugin": "CheckpointIO",
            "torch_plugin": "TorchCheckpointIO",
            "xla_plugin": "XLACheckpointIO",
        },
    ),
    **_package(
        "pytorch.core", _MODULES, {"module": "LightningModule", "datamodule": "LightningDataModule"}
    ),
    **_package("pytorch.core.mixins", _MIXINS, {"hparams_mixin": "HyperparametersMixin"}),
    "pytorch.core.optimizer": _names({f"{_API}.core.optimizer": "LightningOptimizer"}),
    "pytorch.core.saving": _names(
        {
            f"{_HELPERS}.loading": "get_filesystem",
            f"{_API}.core.saving": "load_hparams_from_yaml save_hparams_to_yaml "
            "_load_from_checkpoint=load_from_checkpoint",
        }
    ),
    "pytorch.core.hooks": _names({"stratagem.module": "DataHooks ModelHooks=ModuleHooks"}),
    **_package("pytorch.trainer", {**_TRAINER, **_SEED_EVERYTHING}, {"trainer": "Trainer"}),
    # Private, and in libraries that many use.
    **_package(
        "pytorch.loops",
        _LOOPS,
        {
            "evaluation_loop": "_EvaluationLoop",
            "fit_loop": "_FitLoop",
            "prediction_loop": "_PredictionLoop",
            "training_epoch_loop": "_TrainingEpochLoop",
        },
    ),
    "pytorch.loops.fetchers": _names(
        {
            f"{_API}.placeholders": "_DataFetcher=DataFetcher "
            "_DataFetcherWrapper=DataFetcher _DataLoaderIterDataFetcher=DataFetcher "
            "_PrefetchDataFetcher=DataFetcher"
        }
    ),
    **_package(
        "pytorch.strategies.launchers",
        _LAUNCHERS,
        {
            "multiprocessing": "_MultiProcessingLauncher",
            "subprocess_script": "_SubprocessScriptLauncher",
        },
    ),
    "pytorch.trainer.call": _names(
        {
            f"{_API}.core.calls": "_call_and_handle_interrupt=call_and_handle_interrupt "
            "_call_callback_hooks=call_callback_hooks "
            "_call_callbacks_state_dict=call_callbacks_state_dict "
            "_call_lightning_datamodule_hook=call_lightning_datamodule_hook "
            "_call_lightning_module_hook=call_lightning_module_hook"
        }
    ),
    "pytorch.trainer.connectors": {},
    "pytorch.trainer.connectors.logger_connector": {},
    "pytorch.trainer.connectors.logger_connector.result": _names(
        {f"{_HELPERS}.types": "_OUT_DICT=OUT_DICT"}
    ),
    "pytorch.trainer.connectors.accelerator_connector": _names(
        {
            f"{_API}.accelerators.connector": "_AcceleratorConnector=AcceleratorConnector",
            f"{_HELPERS}.types": "_LITERAL_WARN=LITERAL_WARN _PRECISION_INPUT=PRECISION",
        }
    ),
    "pytorch.trainer.connectors.callback_connector": _names(
        {f"{_API}.core.connectors": "_CallbackConnector=CallbackConnector"}
    ),
    "pytorch.trainer.states": _names(
        {f"{_API}.core.states": "RunningStage TrainerFn TrainerState TrainerStatus"}
    ),
    **_package("pytorch.tuner", _TUNER, {"tuning": "Tuner"}),
    "pytorch.utilities": {
        **{name: place for name, place in _UTILITIES.items() if "Throughput" not in name},
        **_COMBINED,
        **_EXCEPTIONS,
        **_MODELS,
        "is_picklable": _PARSING["is_picklable"],
    },
    "pytorch.utilities.combined_loader": _COMBINED,
    "pytorch.utilities.argparse": _names(
        {
            f"{_HELPERS}.argparse": "_defaults_from_env_vars=defaults_from_env_vars "
            "_parse_env_variables=parse_env_variables"
        }
    ),
    "pytorch.utilities.compile": {
        **_some(_MODELS, "from_compiled to_uncompiled"),
        **_names({f"{_HELPERS}.models": "_maybe_unwrap_optimized=maybe_unwrap_optimized"}),
    },
    "pytorch.utilities.data": {
        **_DATA,
        **_names({f"{_HELPERS}.data": "warning_cache"}),
    },
    "pytorch.utilities.deepspeed": _names(
        {"stratagem.checkpoint": "convert_zero_checkpoint_to_fp32_state_dict"}
    ),
    "pytorch.utilities.enums": _ENUMS,
    "pytorch.utilities.exceptions": _EXCEPTIONS,
    "pytorch.utilities.grads": {"grad_norm": _MODELS["grad_norm"]},
    "pytorch.utilities.memory": _MEMORY,
    "pytorch.utilities.imports": _names(
        # Private, and in Lightning's own examples.
        {f"{_HELPERS}.models": "_OMEGACONF_AVAILABLE _RICH_AVAILABLE _TORCHVISION_AVAILABLE"}
    ),
    **_package("pytorch.utilities.migration", _MIGRATION, {"utils": " ".join(_MIGRATION)}),
    "pytorch.utilities.model_helpers": _some(_MODELS, "get_torchvision_model is_overridden"),
    "pytorch.utilities.model_summary": _names(
        {
            f"{_API}.callbacks.summary": "DeepSpeedSummary=ModelSummary ModelSummary "
            "get_human_readable_count summarize"
        }
    ),
    "pytorch.utilities.model_summary.model_summary_deepspeed": _names(
        {f"{_API}.callbacks.summary": "DeepSpeedSummary=ModelSummary"}
    ),
    "pytorch.utilities.model_summary.model_summary": _SUMMARY,
    "pytorch.utilities.parameter_tying": _some(
        _MODELS, "find_shared_parameters set_shared_parameters"
    ),
    "pytorch.utilities.parsing": _PARSING,
    "pytorch.utilities.rank_zero": _RANK_ZERO,
    "pytorch.utilities.signature_utils": _names(
        {f"{_HELPERS}.parsing": "is_param_in_hook_signature"}
    ),
    "pytorch.utilities.seed": {"isolate_rng": _SEED["isolate_rng"]},
    "pytorch.utilities.types": _TYPES,
    "pytorch.utilities.warnings": _WARNINGS,
    "pytorch.overrides": {},
    "pytorch.overrides.distributed": _names(
        {f"{_HELPERS}.samplers": "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper"}
    ),
    "pytorch.demos": {**_BORING, **_TRANSFORMER, **_LSTM},
    "pytorch.demos.boring_classes": _BORING,
    "pytorch.demos.lstm": _LSTM,
    "pytorch.demos.mnist_datamodule": _names({f"{_API}.demos.mnist": "MNIST MNISTDataModule"}),
    "pytorch.demos.transformer": _TRANSFORMER,
}

_IMPORTS = " ".join(
    (
        *("_IS_INTERACTIVE", "_IS_WINDOWS", "_NUMPY_AVAILABLE", "_PYTHON_GREATER_EQUAL_3_10_0"),
        *(f"_TORCH_GREATER_EQUAL_2_{minor}" for minor in range(10)),
        "_TORCH_GREATER_EQUAL_2_4_1",
    )
)

_FABRIC_SIDE: _Layout = {
    "fabric": {**_FABRIC, **_SEED_EVERYTHING, **_VERSION},
    "fabric.fabric": {"Fabric": _FABRIC["Fabric"]},
    # Private, and in libraries that many use.
    "fabric.wrappers": {
        "is_wrapped": _FABRIC["is_wrapped"],
        **_names(
            {
                "stratagem.lite": "_FabricDataLoader=LiteDataLoader _FabricModule=LiteModule",
                "stratagem.runtime": "_FabricOptimizer=LiteOptimizer",
            }
        ),
    },
    **_package("fabric.loggers", _LOGGERS, _LOGGER_LEAVES),
    "fabric.loggers.logger": {**_some(_LOGGERS, _LOGGER_LEAVES["logger"]), **_DUMMY},
    **_package(
        "fabric.strategies.launchers",
        _LAUNCHERS,
        {
            "multiprocessing": "_MultiProcessingLauncher",
            "subprocess_script": "_SubprocessScriptLauncher",
        },
    ),
    **_package("fabric.strategies", _FABRIC_STRATEGIES, _STRATEGY_LEAVES),
    **_package("fabric.accelerators", _ACCELERATORS, _ACCELERATOR_LEAVES),
    "fabric.accelerators.cuda": {
        **_some(_ACCELERATORS, "CUDAAccelerator find_usable_cuda_devices"),
        **_names({f"{_HELPERS}.memory": "is_cuda_available num_cuda_devices"}),
    },
    **_package(
        "fabric.plugins.collectives",
        _COLLECTIVES,
        {
            "collective": "Collective",
            "single_device": "SingleDeviceCollective",
            "torch_collective": "TorchCollective",
        },
    ),
    "fabric.plugins": {**_PLUGINS, "ClusterEnvironment": _ENVIRONMENTS["ClusterEnvironment"]},
    **_package("fabric.plugins.precision", _PRECISION, _PRECISION_LEAVES),
    "fabric.plugins.precision.precision": {
        "Precision": _PRECISION["Precision"],
        **_names({f"{_HELPERS}.types": "_PRECISION_INPUT=PRECISION"}),
    },
    **_package("fabric.plugins.environments", _ENVIRONMENTS, _ENVIRONMENT_LEAVES),
    **_package(
        "fabric.plugins.io",
        _IO,
        {
            "checkpoint_io": "CheckpointIO",
            "torch_io": "TorchCheckpointIO",
            "xla": "XLACheckpointIO",
        },
    ),
    "fabric.utilities": _UTILITIES,
    "fabric.utilities.apply_func": _MOVING,
    "fabric.utilities.cloud_io": _names(
        {
            f"{_HELPERS}.loading": "_atomic_save=atomic_save _is_dir=is_dir _load=load "
            "_is_local_file_protocol=is_local_file_protocol get_filesystem"
        }
    ),
    "fabric.connector": _names(
        {f"{_HELPERS}.types": "_PLUGIN_INPUT=PLUGIN _PRECISION_INPUT=PRECISION"}
    ),
    "fabric.utilities.data": _DATA,
    "fabric.utilities.device_parser": _names(
        {f"{_HELPERS}.device_parser": "_parse_gpu_ids=parse_gpu_ids"}
    ),
    "fabric.utilities.distributed": _names(
        {
            f"{_HELPERS}.samplers": "DistributedSamplerWrapper "
            "_distributed_is_initialized=distributed_is_initialized",
            "torch.distributed": "ReduceOp",
        }
    ),
    "fabric.utilities.enums": {"LightningEnum": _ENUMS["LightningEnum"]},
    "fabric.utilities.exceptions": _EXCEPTIONS,
    # Private, and in libraries that many use.
    "fabric.utilities.init": _names(
        {f"{_HELPERS}.loading": "_materialize_meta_tensors=materialize_meta_tensors"}
    ),
    "fabric.utilities.load": _names(
        {f"{_HELPERS}.loading": "_NotYetLoadedTensor=NotYetLoadedTensor _lazy_load=lazy_load"}
    ),
    "fabric.utilities.imports": _names({f"{_HELPERS}.imports": _IMPORTS}),
    "fabric.utilities.logger": _names(
        {
            f"{_HELPERS}.logging": "_add_prefix=add_prefix "
            "_convert_json_serializable=convert_json_serializable "
            "_convert_params=convert_params _flatten_dict=flatten_dict "
            "_is_json_serializable=is_json_serializable "
            "_sanitize_callable_params=sanitize_callable_params _sanitize_params=sanitize_params"
        }
    ),
    "fabric.utilities.rank_zero": _RANK_ZERO,
    "fabric.utilities.seed": _SEED,
    "fabric.utilities.spike": _names(
        {f"{_API}.placeholders": "SpikeDetection TrainingSpikeException"}
    ),
    "fabric.utilities.throughput": _THROUGHPUT,
    # Private, and in annotations of libraries that many use.
    "fabric.utilities.types": _names(
        {
            f"{_HELPERS}.types": "LRScheduler Optimizable=Optimizer ReduceLROnPlateau "
            "_DEVICE=DEVICE _MAP_LOCATION_TYPE=MAP_LOCATION _PATH=PATH"
        }
    ),
    "fabric.utilities.warnings": _WARNINGS,
}

LAYOUT: _Layout = {
    "": {
        **_TRAINER,
        **_MODULES,
        **_CALLBACK,
        **_SEED_EVERYTHING,
        **_VERSION,
        "Fabric": _FABRIC["Fabric"],
    },
    **_PYTORCH,
    **_FABRIC_SIDE,
}
"""Of each module: name -> `module:name` of the object. Modules as Lightning names them, within
`lightning`; "" is `lightning` itself."""
