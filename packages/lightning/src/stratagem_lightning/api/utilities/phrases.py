"""The phrases that Lightning has for errors, which users search for, beside ours."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from stratagem.errors import StratagemError

P = ParamSpec("P")
Result = TypeVar("Result")


class Phrase(NamedTuple):
    """How Lightning words an error.

    Args:
        ours: a regular expression for the beginning of our message.
        theirs: the key phrase of Lightning's, with the groups of `ours`, and METHOD for the method
            that was called.
        kind: the exception that Lightning raises, for scripts that catch it.
        first: whether the message begins with the phrase, for scripts that compare its beginning.
    """

    ours: str
    theirs: str
    kind: type[Exception] | None = None
    first: bool = False


PHRASES = (
    # -- arguments of the Trainer
    Phrase(
        r"unknown accelerator '(\w+)'",
        r"You selected an invalid accelerator name: `accelerator='\1'`",
    ),
    Phrase(r"unknown precision '(\d+)'", r"Precision \1 is invalid"),
    Phrase(r"unknown precision ('.+?')", r"Precision \1 is invalid"),
    Phrase(
        r"unknown profiler",
        "When passing string value for the `profiler` parameter of `Trainer`, it can only be one "
        "of these",
    ),
    Phrase(
        r"the launcher 'script' is to start ranks, and this process is one already",
        "Lightning attempted to launch new distributed processes with `local_rank > 0`.",
        RuntimeError,
    ),
    Phrase(
        r"DDPStrategy\(parallel_devices=",
        "parallel_devices set through the strategy: the Trainer's devices choose them",
    ),
    Phrase(
        r"cluster_environment was given twice", "Received multiple values for ClusterEnvironment"
    ),
    Phrase(r"checkpoint_io was given twice", "Received multiple values for CheckpointIO"),
    Phrase(r"devices='?(0|\[\])", r"`Trainer(devices=\1)` value is not a valid input using"),
    Phrase(
        r"devices='?-1'? means all devices, and a CPU",
        "`devices` selected with `CPUAccelerator` should be an int > 0.",
    ),
    Phrase(
        r"(max_epochs|max_steps)=.*expected a whole number of at least -1",
        r"`\1` must be a non-negative integer or -1",
    ),
    Phrase(
        r"gradient_clip_val=.*expected a number",
        "`gradient_clip_val` should be an int or a float",
        TypeError,
    ),
    Phrase(
        r"gradient_clip_algorithm='(\w+)': expected", r"`gradient_clip_algorithm` \1 is invalid"
    ),
    Phrase(r"(check_val_every_n_epoch)=.*expected a whole number", r"`\1` should be an integer."),
    Phrase(
        r"(reload_dataloaders_every_n_epochs)=.*expected a whole number",
        r"`\1` should be an int >= 0",
    ),
    Phrase(r"fast_dev_run=-", "`fast_dev_run` should be >= 0"),
    Phrase(
        r"(limit_\w+_batches|val_check_interval|overfit_batches)=(\S+): expected a number of batch",
        r"You have passed invalid value \2 for `\1`",
    ),
    Phrase(
        r"callbacks has a ModelCheckpoint, but enable_checkpointing=False",
        "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in "
        "callbacks list",
    ),
    Phrase(
        r"several (\w+) have the state_key",
        r"Found more than one stateful callback of type `\1`. In the current configuration, "
        "these callbacks share the state_key",
        RuntimeError,
    ),
    Phrase(
        r"check_val_every_n_epoch=None",
        "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', "
        "datetime.timedelta, or dict kwargs for timedelta) when `check_val_every_n_epoch=None`.",
    ),
    # -- the model and its data
    Phrase(
        r"trainer.(\w+)\(\) expected a stratagem.Module as model, received (\w+)",
        r"`model` must be a `LightningModule`, got `\2`",
        TypeError,
    ),
    Phrase(r"\S+ does not define (\w+), which trainer.(\w+) needs", r"No `\1()` method defined."),
    Phrase(
        r"there is no data: pass a data loader or a DataModule, or define (\w+)_dataloader",
        r"An invalid \1_dataloader was passed to `Trainer.METHOD()`",
        TypeError,
    ),
    Phrase(
        r"val_check_interval=\d+ is more than",
        "`val_check_interval` must be less than or equal to the number of the training batches",
    ),
    Phrase(
        r"ckpt_path='best' needs a ModelCheckpoint",
        '`ckpt_path="best"` is set but `ModelCheckpoint` is not configured.',
        ValueError,
    ),
    Phrase(
        r"there is no model: pass one",
        "`Trainer.METHOD()` requires a `LightningModule` when it hasn't been passed before",
        TypeError,
    ),
    Phrase(r"no checkpoint '", "Checkpoint file not found"),
    Phrase(
        r"this needs a model that was fitted",
        "Saving a checkpoint is only possible if a model is attached to the Trainer",
        AttributeError,
    ),
    # -- optimizers and schedulers
    Phrase(
        r"\S+ returned a ReduceLROnPlateau without 'monitor'",
        "The dict returned by `configure_optimizers` must include a monitor when a "
        "`ReduceLROnPlateau` scheduler is used",
    ),
    Phrase(
        r"\S+ returned .*; expected an optimizer, a list of optimizers",
        "Unknown configuration for model optimizers",
    ),
    Phrase(
        r"\S+ returned a scheduler with interval=",
        'The "interval" key in lr scheduler dict must be "step" or "epoch"',
    ),
    Phrase(
        r"\S+ returned a scheduler's options without 'scheduler'",
        'The lr scheduler dict must have the key "scheduler" with its item being an lr scheduler',
    ),
    Phrase(
        r"\S+ returned a \w+ of a \w+ that it did not return",
        "Some schedulers are attached with an optimizer that wasn't returned from "
        "`configure_optimizers`",
    ),
    Phrase(
        r"ReduceLROnPlateau\(monitor='(.+?)'\): no value of that name was logged; there is (.*?)\.",
        r"ReduceLROnPlateau conditioned on metric \1 which is not available. Available metrics "
        r"are: \2",
    ),
    Phrase(
        r"\S+ returned \d+ optimizers; automatic optimization takes one",
        "Training with multiple optimizers is only supported with manual optimization",
        RuntimeError,
    ),
    Phrase(
        r"\S+ takes optimizer_idx, which is not passed",
        "Remove the `optimizer_idx` argument from `training_step`",
        RuntimeError,
    ),
    Phrase(
        r"\S+ has automatic_optimization = False, so gradient_clip_val",
        "Automatic gradient clipping is not supported for manual optimization. Automatic gradient "
        "accumulation is not supported for manual optimization",
    ),
    Phrase(r"\S+optimizer_step did not call its closure", "The closure hasn't been executed"),
    Phrase(
        r"\S+ returned .* in the place of a scheduler: expected an object with step",
        "The provided lr scheduler doesn't follow PyTorch's LRScheduler API",
    ),
    Phrase(
        r"self.clip_gradients\(gradient_clip_val=(\S+)\) and Trainer\(gradient_clip_val=(\S+)\)",
        r"You have set `Trainer(gradient_clip_val=\2)` and have passed "
        r"`clip_gradients(gradient_clip_val=\1)`",
    ),
    Phrase(
        r"the model and the DataModule both have the hyperparameter",
        "Error while merging hparams: the keys are present in both the LightningModule's and "
        "LightningDataModule's hparams but have different values.",
        RuntimeError,
    ),
    Phrase(r"self.log\(.*?\) works while a Trainer", "You can't `self.log()` here"),
    # -- exports
    Phrase(
        r"to_torchscript\(method=.*expected 'script' or 'trace'",
        "The 'method' parameter only supports 'script' or 'trace'",
        ValueError,
    ),
    Phrase(
        r"\S+to_torchscript\(method='trace'\) needs inputs",
        "Choosing method=`trace` requires either `example_inputs` or `model.example_input_array` "
        "to be defined.",
        ValueError,
    ),
    # -- steps
    Phrase(
        r"\S+training_step returned a (dict|\w*Mapping)",
        "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to "
        "be present",
    ),
    Phrase(
        r"\S+training_step returned a",
        "In automatic optimization, `training_step` must return a Tensor, a dict, or None",
    ),
    Phrase(
        r"self.log\(.*the value goes nowhere",
        "`self.log(on_step=False, on_epoch=False)` is not useful.",
    ),
    # -- callbacks
    Phrase(
        r"\w*EarlyStopping\(monitor='(.+?)'\): no value of that name was logged; there is (.*?)\.",
        r"Early stopping conditioned on metric `\1` which is not available. Pass in or modify your "
        r"`EarlyStopping` callback to use any of the following: `\2`",
        RuntimeError,
    ),
    Phrase(
        r"\w*ModelCheckpoint\(monitor='(.+?)'\): no value of that name was logged; there is "
        r"(.*?)\.",
        r"`ModelCheckpoint(monitor='\1')` could not find the monitored key in the returned "
        r"metrics: [\2]",
    ),
    Phrase(
        r"(\w+) has nowhere to log to",
        r"Cannot use `\1` callback with a `Trainer` that has no logger.",
    ),
    Phrase(
        r"LearningRateMonitor logs a value for each parameter group, and several",
        "A single `Optimizer` cannot have multiple parameter groups with identical `name` values",
    ),
    Phrase(
        r"(?:EarlyStopping|ModelCheckpoint)\(mode='(\w+)'\)",
        r"`mode` can be 'min' or 'max' but got \1",
    ),
    Phrase(r"ModelCheckpoint\((save_top_k)=-", r"Invalid value for \1. Must be >= -1"),
    Phrase(r"ModelCheckpoint\((every_n_\w+)=-", r"Invalid value for \1. Must be >= 0"),
    Phrase(
        r"accumulate_grad_batches=\d+ beside",
        "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` "
        "callback",
    ),
    Phrase(r"seed=(\S+): expected a whole number from 0", r"\1 is not in bounds"),
    Phrase(r"Timer\(interval='(\w+)'\)", r"Unsupported parameter value `\1`"),
    # -- profilers
    Phrase(
        r"the profiler was told that '(.+?)' begins",
        r"Attempted to start \1 which has already started",
        ValueError,
    ),
    Phrase(
        r"the profiler was told that '(.+?)' ends",
        r"Attempting to stop recording an action (\1) which was never started",
        ValueError,
    ),
    Phrase(
        r"PyTorchProfiler\(table_kwargs=.*?does not take '(row_limit|sort_by)'",
        r"Found invalid table_kwargs key: \1. This is already a positional argument of the "
        "Profiler",
        KeyError,
        first=True,
    ),
    Phrase(
        r"PyTorchProfiler\(table_kwargs=.*?does not take '(\w+)'",
        r"Found invalid table_kwargs key: \1",
        KeyError,
        first=True,
    ),
    Phrase(r"Throughput.update\(lengths", "", RuntimeError),
    # -- hyperparameters
    Phrase(
        r"save_hyperparameters\(.*?\): \S+ is no argument",
        "Primitives (<class 'bool'>, <class 'int'>, <class 'float'>, <class 'str'>) are not "
        "allowed.",
        ValueError,
    ),
    # -- the Tuner
    Phrase(
        r"lr_find takes one optimizer",
        "`Tuner.lr_find()` currently only works with single optimizer",
    ),
    Phrase(
        r"scale_batch_size was given loaders",
        "Batch size finder cannot be used with dataloaders passed directly to `.fit()`",
    ),
    Phrase(
        r"\w+ with \d+ ranks: one that runs out of memory alone",
        "`Tuner.scale_batch_size()` is not supported with distributed strategies. Batch size "
        "finder is not supported with distributed strategies.",
    ),
    Phrase(
        r"lr_find\(update_attr=True\): \S+ has no 'lr'",
        "When the learning rate is to be updated, the model should have one of these fields: "
        "lr, learning_rate",
        AttributeError,
    ),
    Phrase(
        r"scale_batch_size\(mode='(\w+)', method='(?:fit|validate|test|predict)'\): expected",
        r"`mode` should be either of 'power' or 'binsearch', received '\1'",
    ),
    Phrase(
        r"(?:scale_batch_size|lr_find)\(.*?method='(?!fit')(\w+)'.*?\): expected",
        r"method '\1' is invalid.",
    ),
    # -- Fabric
    Phrase(
        r"setup\(\) received a model that was set up before",
        "A model should be passed only once to the `setup` method",
    ),
    Phrase(
        r"log_dict: '\w+': expected a number or a tensor of one element, received \{",
        "nested dictionaries cannot be logged",
    ),
    Phrase(
        r"log_dict: '\w+': expected a number or a tensor of one element, received \[",
        "`list` values cannot be logged",
    ),
    Phrase(
        r"log_dict: '\w+': expected a number or a tensor of one element, received one of shape",
        "it cannot be converted to a scalar.",
    ),
)


def in_lightnings_words(method: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a method whose errors contain the phrase that Lightning has for them.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> Trainer(fast_dev_run=-2, accelerator="cpu")
        Traceback (most recent call last):
        ...
        stratagem.errors.ConfigurationError: fast_dev_run=-2: expected True, False, or a number of \
batches. Lightning's message: `fast_dev_run` should be >= 0
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except StratagemError as error:
            raise with_phrase(error, method.__name__) from error.__cause__

    return call


def with_phrase(error: StratagemError, method: str) -> Exception:
    """Return an error with Lightning's phrase, as an exception of Lightning's kind too.

    Args:
        error: raised by `method`.
        method: the name of the method that the user called.
    """
    text = str(error)
    for phrase in PHRASES:
        found = re.match(phrase.ours, text, re.DOTALL)
        if found is None:
            continue
        theirs = found.expand(phrase.theirs).replace("METHOD", method)
        if theirs not in text:
            both = f"{theirs}. {text}" if phrase.first else f"{text}. Lightning's message: {theirs}"
            error.args = (both, *error.args[1:])
        if phrase.kind is None or isinstance(error, phrase.kind):
            return error
        own = type(error)
        names = {"__module__": own.__module__, "__doc__": own.__doc__}
        kind: Any = type(own.__name__, (own, phrase.kind), names)
        made: Exception = kind(*error.args).with_traceback(error.__traceback__)
        return made
    return error
