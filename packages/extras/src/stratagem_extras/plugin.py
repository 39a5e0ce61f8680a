"""What this distribution provides, as data; nothing is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.discovery import (
    CallbackSpec,
    Command,
    ComponentSpec,
    LoggerSpec,
    NameSpec,
    ProfilerSpec,
    hookimpl,
)

CALLBACKS = (
    ("backbone_finetuning", "finetuning:BackboneFinetuning", "unfreeze a backbone later"),
    ("device_stats", "device_stats:DeviceStatsMonitor", "log the memory and load of devices"),
    ("ema", "weight_averaging:EMAWeightAveraging", "average the weights exponentially"),
    (
        "gradient_accumulation",
        "gradient_accumulation:GradientAccumulationScheduler",
        "change the number of accumulated batches by epoch",
    ),
    ("goodput", "goodput:Goodput", "measure which part of the time trained"),
    ("lambda", "lambda_callback:LambdaCallback", "call functions at events"),
    ("lr_monitor", "lr_monitor:LearningRateMonitor", "log the learning rates"),
    ("model_summary", "model_summary:ModelSummary", "print the layers"),
    (
        "on_exception_checkpoint",
        "on_exception_checkpoint:OnExceptionCheckpoint",
        "save a checkpoint when training fails",
    ),
    (
        "optimizer_in_backward",
        "optimizer_in_backward:OptimizerInBackward",
        "step each parameter within the backward pass",
    ),
    ("pruning", "pruning:ModelPruning", "prune weights while training"),
    ("rich_progress_bar", "progress_bar_names:RichProgressBar", "the bar under Rich's name"),
    ("schedule_free", "schedule_free:ScheduleFree", "the modes of schedule-free optimizers"),
    (
        "swa",
        "stochastic_weight_averaging:StochasticWeightAveraging",
        "average the weights of the last epochs",
    ),
    ("throughput", "throughput:ThroughputMonitor", "log samples and batches per second"),
    ("timer", "timer:Timer", "end training after a time"),
    (
        "trained_weights_only",
        "trained_weights_only:TrainedWeightsOnly",
        "leave frozen weights out of checkpoints",
    ),
    ("tqdm_progress_bar", "progress_bar_names:TQDMProgressBar", "the bar under tqdm's name"),
    ("weight_averaging", "weight_averaging:WeightAveraging", "average the weights"),
)
LOGGERS = (
    ("tensorboard", "tensorboard_logger:TensorBoardLogger", "files that TensorBoard shows"),
    ("mlflow", "mlflow_logger:MLFlowLogger", "an MLflow server, or a local database"),
    ("wandb", "wandb_logger:WandbLogger", "Weights & Biases"),
    ("comet", "comet_logger:CometLogger", "Comet"),
    ("neptune", "neptune_logger:NeptuneLogger", "a Neptune server"),
)
PROFILERS = (
    ("simple", "simple:SimpleProfiler", "the time of each action"),
    ("advanced", "advanced:AdvancedProfiler", "the functions of each action, by cProfile"),
    ("pytorch", "pytorch:PyTorchProfiler", "operators and kernels, by torch.profiler"),
)
NAMES = (
    ("stratagem.plan_memory", "planner.plan:plan_memory", "what each strategy would hold"),
    ("stratagem.Tuner", "tuner:Tuner", "find a batch size or a learning rate"),
    ("stratagem.accelerators.memory_report", "memory_report:memory_report", ""),
    ("stratagem.callbacks.BaseFinetuning", "callbacks.finetuning:BaseFinetuning", ""),
    ("stratagem.callbacks.RunHints", "callbacks.run_hints:RunHints", ""),
    (
        "stratagem.callbacks.TerminalDisplay",
        "callbacks.terminal:TerminalDisplay",
        "the progress bars of a terminal",
    ),
    ("stratagem.callbacks.summarize", "callbacks.model_summary:summarize", ""),
    (
        "stratagem.callbacks.BasePredictionWriter",
        "callbacks.prediction_writer:BasePredictionWriter",
        "",
    ),
    (
        "stratagem.checkpoint.PretrainedWeights",
        "pretrained:PretrainedWeights",
        "a folder of safetensors to load a model from",
    ),
    (
        "stratagem.checkpoint.save_pretrained",
        "pretrained:save_pretrained",
        "write a model as a folder of safetensors",
    ),
    ("stratagem.cli.doctor_report", "commands.doctor:doctor", "the full form of a command"),
    ("stratagem.cli.listed_component", "commands.doctor:listed_component", ""),
    ("stratagem.cli.SLOW_IMPORT", "commands.doctor:SLOW_IMPORT", ""),
    (
        "stratagem.cli.strategies_report",
        "commands.strategies:strategies",
        "the full form of a command",
    ),
    ("stratagem.cli.accelerate_config", "cli.accelerate_config:read_config", ""),
    ("stratagem.cli.LRSchedulerCallable", "cli.parser:LRSchedulerCallable", ""),
    ("stratagem.cli.OptimizerCallable", "cli.parser:OptimizerCallable", ""),
    ("stratagem.cli.SaveConfigCallback", "cli.save_config:SaveConfigCallback", ""),
    ("stratagem.cli.TrainerArgumentParser", "cli.parser:TrainerArgumentParser", ""),
    ("stratagem.cli.TrainerCLI", "cli.trainer_cli:TrainerCLI", "a Trainer from a command line"),
    (
        "stratagem.lite.gather_for_metrics",
        "gathering:gather_for_metrics",
        "what Lite.gather_for_metrics calls",
    ),
    (
        "stratagem.lite.pad_across_processes",
        "gathering:pad_across_processes",
        "what Lite.pad_across_processes calls",
    ),
    (
        "stratagem.lite.split_between_processes",
        "gathering:split_between_processes",
        "what Lite.split_between_processes calls",
    ),
    ("stratagem.module.to_onnx", "export:to_onnx", "what Module.to_onnx calls"),
    (
        "stratagem.module.to_torchscript",
        "export:to_torchscript",
        "what Module.to_torchscript calls",
    ),
)


COMMANDS = (
    ("explain", "commands.explain:explain", "Show what a request would use, and why."),
    ("plan", "planner.command:plan", "Show which strategies a model would fit with."),
    ("evaluate", "commands.evaluate:evaluate", "Run tasks of lm-eval on a language model."),
    ("report", "report.command:report", "Draw the logs of one or several runs as one HTML file."),
    ("fit", "cli.commands:fit", "Train a model that a config file describes."),
    ("validate", "cli.commands:validate", "Validate a model that a config file describes."),
    ("test", "cli.commands:test", "Test a model that a config file describes."),
    ("predict", "cli.commands:predict", "Predict with a model that a config file describes."),
    (
        "checkpoint inspect",
        "checkpoints.inspection:inspect",
        "Show who saved a checkpoint, under what, and what is in it.",
    ),
    (
        "checkpoint verify",
        "checkpoints.inspection:verify",
        "Read checkpoints whole and compare them with their checksums.",
    ),
    (
        "checkpoint consolidate",
        "checkpoints.commands:consolidate",
        "Make one file of a checkpoint that is a directory, or is in a plugin's format.",
    ),
    (
        "checkpoint convert",
        "checkpoints.commands:convert",
        "Write the weights in a checkpoint as safetensors, or a whole checkpoint for Lightning.",
    ),
    (
        "checkpoint average",
        "checkpoints.commands:average",
        "Write a checkpoint whose weights are the mean of those of others.",
    ),
)


@hookimpl
def stratagem_cli() -> Iterable[Command]:
    """Return the commands of this distribution."""
    return [Command(name, text, f"stratagem_extras.{where}") for name, where, text in COMMANDS]


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the callbacks, loggers, profilers and import names of this distribution."""
    rooms: tuple[tuple[type[ComponentSpec], str, tuple[tuple[str, str, str], ...]], ...] = (
        (CallbackSpec, "stratagem_extras.callbacks", CALLBACKS),
        (LoggerSpec, "stratagem_extras.loggers", LOGGERS),
        (ProfilerSpec, "stratagem_extras.profilers", PROFILERS),
        (NameSpec, "stratagem_extras", NAMES),
    )
    return tuple(
        kind(name=name, target=f"{package}.{target}", api_version=2, summary=summary)
        for kind, package, rows in rooms
        for name, target, summary in rows
    )
