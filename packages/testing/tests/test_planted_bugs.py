"""The conformance kit fails strategies that are wrong on purpose, and says what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratagem_testing.strategies.session import Item, Outcome, Reference, failures, run_checks
from stratagem_testing.strategies.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.conformance]

FILE = Path(__file__).with_name("planted_strategies.py")

# The class, the check that fails, and what it says.
PLANTED = [
    ("SaysCompiles", "capabilities/compiles", "take compile=True ('model' in compiles)"),
    ("NotAveraged", "steps/gradient", "gradients are not averaged over ranks"),
    ("NotAveraged", "losses/embedding", "was not that of the mean gradient over all ranks"),
    ("Summed", "steps/gradient", "gradients are summed over ranks instead of averaged"),
    ("DividedTwice", "steps/gradient", "divided by the number of ranks twice"),
    (
        "NotDividedByMicroBatches",
        "steps/accumulation",
        "the loss is not divided by the number of micro-batches",
    ),
    ("LastMicroBatchOnly", "steps/accumulation", "the last micro-batch alone"),
    ("DropsLastMicroBatch", "steps/accumulation", "not the mean over all ranks and micro-batches"),
    ("LossScaled", "steps/gradient", "5 times the gradient: the loss is scaled on its way"),
    ("StepsTwice", "steps/gradient", "the step was taken twice"),
    ("NeverSteps", "steps/gradient", "no step was taken"),
    ("ForgetsZeroGrad", "steps/several", "Each step starts without gradients"),
    ("NeverCounts", "steps/gradient", "the step was not counted"),
    ("EndsNoMicroBatch", "steps/accumulation", "before it ended the one before"),
    ("ClipsBeforeReduction", "steps/clip norm", "gradients that each rank clipped by itself"),
    ("ClipsBeforeUnscaling", "steps/clip norm", "clipped while multiplied by 2"),
    ("ClipsByLocalNorm", "steps/clip norm", "not clipped by the norm over all parameters"),
    ("IgnoresClip", "steps/clip norm", "the mean gradient, not clipped"),
    ("IgnoresClipAlgorithm", "steps/clip value", "clipped by norm and not by value"),
    ("NeverReadsClip", "steps/clip norm", "has not read step.clip"),
    ("OwnInitialWeights", "losses/initial weights", "do not train from rank 0's weights"),
    ("Unties", "losses/tied", "prepare or wrap has replaced them one by one"),
    ("TrainsFrozen", "losses/frozen", "not from 1 on"),
    ("UnexplainedUnused", "losses/unused", "does not name its parameters"),
    ("KeepsBatchNorm", "losses/batch_norm", "look at synchronize_batch_norm"),
    ("OldParameters", "capabilities/rebinds optimizers", "does not train the model"),
    ("IgnoresPrecision", "precisions/bf16-true", "the precision was not applied"),
    ("OwnOptimizer", "lite/optimizer afterwards", "losses are those of single_device up to"),
    ("NoBarrier", "collectives/barrier", "there is no barrier"),
    ("BroadcastsFromZero", "collectives/broadcast", "src=1) returned the data of rank 0"),
    ("GathersReversed", "collectives/all_gather", "in the order of ranks"),
    ("GathersEven", "collectives/gather", "tensors of different lengths as they are"),
    ("ReducesToMean", "collectives/all_reduce", "another reduction than 'sum'"),
    ("ReducesInPlace", "collectives/all_reduce", "all_reduce changed the tensor of rank 0"),
    ("NoSyncSyncs", "collectives/no_sync", "communicated gradients on rank 0"),
    ("NeverSyncsAgain", "steps/accumulation", "gradients are not averaged over ranks"),
    ("ReadsFirstPart", "data/sampler", "have [1, 2] for it"),
    ("ReadsEverything", "data/sampler", "divide the data into 1 part(s), expected 2"),
    ("EvaluatesOwnPart", "data/logging", "it was not reduced over all parts of the data"),
    ("OwnBuffers", "evaluation/one model", "ranks 0 and 1 evaluate different models"),
    ("StaysInEvaluationMode", "evaluation/one model", "evaluation mode was left on"),
    ("NotesNoBackward", "data/hooks", "on_before_backward 0 time(s), expected 3"),
    ("HooksTwice", "data/hooks", "on_after_backward 6 time(s), expected 3"),
    ("PrefixesNames", "state/into single_device", "lacks 4 of the model's names"),
    ("SavesOwnPart", "state/into single_device", "and rank 0's alone would be saved"),
    ("SavesOwnRows", "state/into single_device", "return whole tensors, or Shards"),
    ("LoadsNoWeights", "state/out of single_device", "weights, the order of samples or random"),
    ("LoadsNoOptimizer", "state/exact resume", "the optimizer's state was not restored"),
    ("LoadsNoOptimizer", "state/round trip", "load_optimizer_state does not restore"),
    ("SavesOldWeights", "state/into single_device", "weights, the order of samples or random"),
    ("ForgetsOwnState", "state/round trip", "load_state does not restore what state returned"),
    ("OwnNoise", "state/exact resume", "the losses after a resume are not those of"),
    ("LeaksGroup", "life/nothing left between runs", "process group(s) of torch.distributed"),
    ("LeaksThread", "life/nothing left between runs", "the thread mine (Thread)"),
    ("LeaksVariable", "life/nothing left between runs", "the environment variable MINE_RUNS"),
    ("LeaksPatch", "life/nothing left between runs", "functional.linear was replaced"),
    ("KeepsFirstModel", "life/twice", "fit number 2 of one model"),
    ("SaysReplicated", "losses/dense", "was not that of the mean gradient over all ranks"),
    ("SaysAlike", "capabilities/parameters of ranks", "say parameters='drift'"),
    ("TrainsInEvaluation", "evaluation/one model", "has to put back what it changes"),
    ("KeepsGradients", "life/memory", "behind, until memory is full"),
    ("LastModelOnly", "lite/two models", "keep what belongs to a model in its PreparedModel"),
    ("FirstGroups", "optimizers/added group", "look at optimizer.param_groups in each step"),
    ("SaysBackwardInForward", "capabilities/backward in forward", "backward_in_forward=True"),
    ("SaysNoClipping", "steps/clip norm", "it was refused"),
    ("OtherSignature", "steps/gradient", "OtherSignature.optimizer_step(self, prepared: "),
    ("KeepsComponents", "steps/gradient", "does not call super().__init__(**components)"),
    ("ReturnsModule", "steps/gradient", "ReturnsModule.prepare returned a Dist"),
    ("WrapsNothing", "steps/gradient", "WrapsNothing.wrap(module) returned None"),
    ("NeverWraps", "steps/gradient", "NeverWraps.prepare has not called wrap"),
    ("SaysOneProcess", "steps/gradient", "has one_process=True, so that one process was to drive"),
    ("SaysOwnsClipping", "steps/gradient", "has engine_clips=True, but the class overrides none"),
    ("SaysOwnsStep", "steps/gradient", "has engine_steps=True, but the class overrides none"),
    ("LeavesClippingToDDP", "steps/gradient", "has engine_clips=True, but the class overrides"),
    ("AveragesUnderTheTrainer", "lite/loop", "ranks 0 and 1 have different values of '0.weight'"),
    ("ZerosForUnused", "losses/unused", "keeps grad=None"),
    ("ListsTrainedOnce", "steps/unfrozen", "look at requires_grad in each step"),
    ("IgnoresClosure", "optimizers/closure", "did not train as the closure asks"),
    ("StepsPastPrecision", "precisions/scaled loss", "step by self.precision.optimizer_step"),
    ("ClipsBeforeUnscaling", "precisions/scaled loss and clip", "changes what is trained"),
    ("FirstLearningRates", "optimizers/groups and schedule", "a scheduler changes the"),
    ("FirstOptimizer", "optimizers/two", "one of two optimizers of a model was not stepped"),
    ("LoadsFirstGroup", "state/round trip", "they differ at [0]['param_groups'][1]['lr']"),
    ("IgnoresBackwardArguments", "optimizers/arguments of backward", "retain_graph=True"),
    ("DropsPositionalArguments", "optimizers/arguments of backward", "and by position"),
    ("AveragesForOthersOnly", "optimizers/averages", "as without communication: parameters='dr"),
    ("AverageOfWeightsBefore", "state/in part", "is that of the weights before. Let load_model"),
    ("AverageOfWeightsOnly", "evaluation/same training", "such as an average of weights, is not"),
    ("AnchorsOfTrained", "optimizers/averages", "with a layer that is unfrozen later ended in Key"),
    ("DriftsUnclipped", "lite/clip", "times the limit in each step: look at clip_gradients"),
    ("DriftsClippedByNorm", "lite/clip", "look at clip.algorithm in clip_gradients"),
    ("DriftsUndivided", "life/same batches", "times as far as steps of one that"),
    ("DriftsByTheLast", "life/same batches", "and gradients add up in p.grad"),
    ("RaisesRates", "optimizers/groups and schedule", "Put back in optimizer_step what it changes"),
    ("ScalesFirstOptimizer", "precisions/scaled loss", "changes what is trained"),
    ("StepsFirstByClosure", "optimizers/closure", "There are two optimizers"),
    ("HoldsNothing", "collectives/no_sync", "Override no_sync to return a context"),
    ("AverageIsTheModel", "state/exact resume in bf16-true", "Keep parameter.detach().clone()"),
    ("AveragesWeightsOnly", "optimizers/averages", "average every parameter of each group"),
    ("AverageRunsAway", "evaluation/same training", "moves away from the weights"),
    ("OwnNorm", "lite/clip", "returned None on rank 0, expected "),
    ("OwnInitialBuffers", "losses/initial weights", "from rank 0's weights and buffers"),
    ("SavesOtherDtype", "state/into single_device", "'net.0.weight': 'float64[8, 6]'"),
    ("EvaluatesAnAverage", "evaluation/one model", "has to put back what it changes"),
    ("Unfreezes", "evaluation/one model", "another requires_grad: net.0.bias"),
    ("LosesComponents", "life/arguments", "its `requested` lacks launcher"),
    ("ForgetsOptions", "life/arguments", "trains a model with an unused layer, and ends in"),
    ("ReadsByLocalRank", "nodes/two of one rank", "data_split of rank 1 is [0, "),
    (
        "ReadsByLocalRank",
        "nodes/two of two ranks",
        "data_split of rank 2 is [0, ",
    ),
    ("StepsByLocalRank", "nodes/two of one rank", "steps/several, on 2 nodes: "),
    ("GathersByLocalRank", "nodes/two of two ranks", "collectives/all_gather, on 2 nodes: "),
    ("AveragesUnderTheTrainer", "lite/loop", "finish_step and train_step are not called"),
    ("LosesLayout", "losses/initial weights", "a reshape has lost the layout of a parameter"),
    ("WaitsForTheFirst", "steps/gradient", "An exchange in the background may not have"),
    ("Misspelled", "life/methods", "nothing calls Misspelled.end_trainig: no method of the"),
    ("NoComponents", "life/arguments", "an unexpected keyword argument 'launcher'"),
    ("GeneratorNoSync", "steps/gradient", "decorate it with contextlib.contextmanager"),
    ("AsyncWrap", "steps/gradient", "is a coroutine, which nobody awaits"),
    ("OverridesFinal", "steps/gradient", "_OrdersItself.by_data_group takes the place of"),
    ("SavesFirstWeights", "state/exact resume", "model_state and load_model_state"),
    ("SavesFirstOptimizer", "state/exact resume", "optimizer_state and load_optimizer_state"),
    ("SavesFirstRates", "state/exact resume", "has the learning rates [0"),
    ("LoadsNoGroups", "state/exact resume", "load_optimizer_state has to restore param_groups"),
    ("ForgetsError", "state/exact resume", "at state and load_state for what the strategy itself"),
    ("ForgetsCount", "state/exact resume", "for what the strategy itself keeps"),
    ("LosesMasters", "state/exact resume in bf16-true", "weights in a higher precision"),
    ("OwnGradients", "losses/routed", "'net.experts."),
    ("ClipsTheModel", "optimizers/two and clip", "is about optimizer.param_groups"),
    ("IgnoresNormType", "optimizers/clip by the largest", "clip.norm_type in clip_gradients"),
    ("HidesNaN", "steps/not finite", "as nan_to_num does"),
    ("SeedsInPrepare", "life/random numbers", "prepare seeds torch: after it, "),
    ("SeedsInEvaluation", "life/random numbers", "evaluation changes the random numbers of torch"),
    ("Unpicklable", "life/pickled", "cannot pickle '_thread.lock' object"),
    ("FirstBucketOnly", "steps/large model", "(so it is for 'net.parts."),
    ("InPairs", "steps/three ranks", "not the mean over all ranks"),
    ("InPairs", "collectives/three ranks", "all_reduce(mean of float32) returned"),
    ("KeepsModels", "life/freed", "forget in release(prepared)"),
    ("EstimatesLess", "capabilities/what ranks hold", "leaves 50% of the parameters on each rank"),
    ("EstimatesNothing", "capabilities/what ranks hold", "with the phase 'step', and returned {}"),
    ("SaysSharded", "capabilities/what ranks hold", "sharded_state=True in the capabilities"),
    ("RoundsOnTheWire", "steps/gradient", "rounded to a lower precision on its way"),
    ("MatricesOnly", "steps/gradient", "(so it is for 'net.0.bias', 'net.2.bias'; other"),
    ("PastRunBackward", "optimizers/the Module's backward", "or prepared.run_backward(loss)"),
    ("HoldsAfterError", "lite/error in accumulation", "put back in `finally` what no_sync"),
    ("StepsWithoutLoss", "steps/no loss", "only if accumulate_all returns True"),
    ("SavesEveryBuffer", "state/round trip", "without buffers of persistent=False"),
    ("LoadsWhatFits", "state/other model", "has to refuse missing and unexpected names"),
    ("NoDataShard", "steps/gradient", "data_split is rank 0: (0, 3), rank 1: (1, 3)"),
    ("RoundsOptimizerState", "state/exact resume in 64-true", "may have gone through float32"),
    ("TakesNorm1As2", "optimizers/clip by the sum", "norm_type=1 did not clip by the sum"),
    (
        "IgnoresErrorIfNonfinite",
        "optimizers/clip what is not finite",
        "pass clip.error_if_nonfinite on in clip_gradients",
    ),
    ("TrainsWhatIsInEvaluationMode", "losses/initial weights", "'net.norm' is trained in training"),
    (
        "TrainsAfterEvaluation",
        "evaluation/one model",
        "'net.2' in training mode after an evaluation",
    ),
    ("HoldsEveryModel", "lite/two models", "keep what belongs to a model in its PreparedModel"),
    ("InnerEndsOuter", "collectives/no_sync", "once another no_sync(prepared) within it had ended"),
    ("InnerEndsOuterFeedback", "lite/accumulation, nested", "Let no_sync(prepared) put back what"),
    ("LosesGroupKeys", "state/round trip", "['param_groups'][1] (['note']"),
    ("SavesFloat32Buffers", "state/round trip", "'net.fraction' in torch.float32 on rank 0"),
    ("RealPartOnly", "losses/complex", "'net.phase' is"),
    ("Conjugates", "losses/complex", "'net.phase' is"),
    ("SavesIntegersAsFloats", "state/round trip", "they differ at ['net.count']"),
    ("SavesCountsAsFloats", "state/round trip", "the 'step' of 'net.first.bias' as 16777220"),
    ("SendsIntegersAsFloats", "losses/initial weights", "the buffer 'net.count' is"),
    ("ReducesIntegersAsFloats", "collectives/all_reduce", "went through a floating-point dtype"),
    ("LoadsParametersOnly", "state/in part", "another one at ['net.scale']"),
    ("LosesExtraState", "state/round trip", "they differ at ['net._extra_state']['history']"),
    (
        "StripsParameters",
        "losses/initial weights",
        "'net.last.bias' has lost its attribute is_last",
    ),
    ("SkipsZeroGradients", "steps/zero gradient", "call optimizer_step whatever the gradients are"),
    ("NamesInOtherOrder", "state/round trip", "['net.first.weight']['momentum_buffer']"),
    ("CountsTiedTwice", "steps/accumulation and clip", "it was not clipped by the norm"),
    ("MovesFrozen", "steps/unfrozen", "'net.0.weight'"),
    ("MovesWhatWasTrained", "steps/unfrozen", "leave the gradient of what is frozen None"),
    ("SendsTrainedOnly", "losses/initial weights", "different values of 'net.norm.weight'"),
    ("SavesTrainedOnly", "state/round trip", "lacks 2 of the model's names"),
    ("FloorsMeans", "collectives/all_reduce", "all_reduce(mean of int64) returned"),
    ("NewParametersAtLoad", "state/exact resume", "parameter(s) that the model does not have"),
    ("DividesByOption", "steps/several", "divides losses by its own number of micro-batches"),
    ("ClearsTheModel", "optimizers/two", "one of two optimizers of a model was not stepped"),
    ("SkipsForwardHooks", "lite/outputs and hooks", "forward pre-hook was called 0 time(s)"),
    ("LosesParameterHooks", "lite/hooks of parameters", "the parameter '0.weight' was called 0"),
    ("TrainsACopy", "optimizers/closure", "without any parameter of a model"),
    ("DropsLossOfClosure", "optimizers/closure", "return what that step returns"),
    ("ConvertsOutputs", "lite/outputs and hooks", "returned torch.float32 at 'number' on rank 0"),
    ("SendsContiguousCopies", "losses/initial weights", "different values of 'net.first.weight'"),
    ("LoadsHalf", "state/in part", "has loaded some of it before"),
    ("CountsOfFormerFits", "life/twice", "Keep it in prepared.strategy_data"),
    ("MultipliesOption", "life/twice", "the option 'every' of the strategy is "),
    ("ClipsBeforeHook", "steps/clip norm", "has changed after it was clipped"),
    ("ListsMicroBatches", "steps/no loss", "without list(micro_batches)"),
    ("DividesLossInPlace", "steps/accumulation", "the loss was changed in place"),
    ("OneFlatTensor", "steps/two dtypes", "Use one flat tensor for each dtype"),
    ("SavedBuffersOnly", "evaluation/one model", "or persistent=False) are not made alike"),
    ("CountsSkippedSteps", "precisions/scaled loss and clip", "counts 4 steps, expected 3"),
    ("DropsCountAtEnd", "state/round trip", "end_training(prepared) has changed or dropped"),
    ("ReducesNumbersAsFloats", "collectives/all_reduce", "all_reduce_ints('sum') returned"),
    ("StaysGathered", "lite/forward before the step", "free them in optimizer_step"),
    ("GathersWithoutGradients", "collectives/all_gather", "gradients do not flow through it"),
    ("PrefixesNames", "losses/dense", "there is 'module.net.0.weight'"),
    ("EvaluatesAnAverage", "losses/initial weights", "what evaluation(prepared) leaves"),
    ("ForgetsCount", "state/exact resume", "the optimizer's state is that of the save"),
    ("SavesFirstOptimizer", "state/exact resume", "load_optimizer_state): it differs at [0]"),
    (
        "StaleSlowWeights",
        "state/out of single_device",
        "renew what prepare has made of the weights",
    ),
    ("ForgetsAverage", "state/exact resume", "what evaluation(prepared) uses, such as an average"),
    ("ExplainsEverything", "end/the user's error", "explain(prepared, error) has to return None"),
    ("ConvertsNothing", "precisions/bf16-true", "has to call precision.convert_module(module)"),
    ("AlwaysScalesToTheLimit", "lite/clip", "which has to leave those as they are"),
    ("ClipsWhatHasNoGradient", "steps/unfrozen", "'NoneType' object has no attribute 'norm'"),
    ("AveragesAfterHook", "steps/gradient", "average before step.before_optimizer_step"),
    (
        "UnscalesAfterHook",
        "precisions/scaled loss and clip",
        "before step.before_optimizer_step, whose hook",
    ),
    ("StripsEveryModule", "losses/initial weights", "returned no 'net.module.weight'"),
    ("NamesTiedOnce", "state/round trip", "such as 'net.tied.weight'"),
    ("SavesFirstOfTwo", "lite/state", "no parameter group of 2.weight"),
    ("StateAfterStep", "state/exact resume", "KeyError: 'steps'"),
    ("OptimizerStateAfterStep", "state/exact resume", "KeyError: 'net.0.bias'"),
    ("StateOfFirstOptimizer", "lite/state", "without an optimizer end on rank 0 in IndexError"),
    ("KeepsItsError", "lite/state", "which has to replace what the model had before"),
    ("ErrorByName", "lite/two models", "Parameters of two models may have the same names"),
    ("OtherOptionsOnce", "optimizers/groups and schedule", "their momentum and weight_decay"),
    ("ClosureOnce", "optimizers/closure", "The optimizer calls its closure twice"),
    ("LastBackwardOnly", "optimizers/two backward passes", "leave in p.grad what an earlier"),
    ("KeepsWhatWasDropped", "lite/error in accumulation", "where zero_grad() drops them"),
    ("ContextLeavesEmpty", "lite/optimizer afterwards", "the first loss is"),
    ("EstimatesByDevice", "capabilities/what ranks hold", "was called after bind alone"),
    ("GathersAsFloats", "collectives/all_gather", "integers have to keep their dtype"),
    ("GathersRows", "collectives/all_gather", "IndexError"),
    ("BroadcastsJson", "collectives/broadcast", "(1, 'two', None, True, 0.5)"),
    ("ReducesViews", "collectives/all_reduce", "view size is not compatible"),
    ("ReducesToFloat", "collectives/all_reduce", "all_reduce of bfloat16 returned"),
    ("ReducesBoolsToNumbers", "collectives/all_reduce", "all_reduce of bools returned"),
    ("HooksPile", "life/memory", "remove hooks that were set for one step"),
    ("HooksStay", "life/twice", "3 hooks on rank 0 after three fits"),
    ("CannotBeCopied", "life/freed", "Users copy models"),
    ("ConvertsIntegers", "precisions/bf16-true", "has to convert floating-point tensors only"),
    ("EvaluatesWithoutAutocast", "precisions/bf16-mixed", "computes past the precision"),
    ("EveryEntryIsAParameter", "losses/initial weights", "'NoneType' object has no attribute"),
    ("StaysInStep", "end/the user's error", "another fit by the same strategy object ended"),
    ("EvaluationNoFinally", "end/the user's error", "has to put back in `finally` what it"),
    ("RetainGraphOnly", "optimizers/arguments of backward", "pass each argument on"),
    ("WritesInForward", "lite/optimizer afterwards", "modified by an inplace operation"),
    ("SavesLastModel", "lite/two models", "one has the weights of the other"),
    ("RebuildsOutputs", "lite/outputs and hooks", "at 'named' on rank 0, expected ['_Pair'"),
    ("NeedsOptimizerToLoad", "state/other model", "prepared.optimizers is empty"),
    ("GathersNoEmptyBytes", "collectives/gather", "expected ['', 'BB']"),
    ("NeedsPartner", "life/one rank", "ZeroDivisionError"),
    ("TakesOverTensors", "state/in part", "the model changes with the tensors of the state"),
    ("DropsStateAtRelease", "life/bound again", "the model may still be evaluated or saved"),
    ("ReducesInSinglePrecision", "collectives/all_reduce", "all_reduce of float64 returned"),
    ("ComparesAsFloats", "collectives/all_reduce", "all_reduce of large integers returned"),
    ("ReducesByNumpy", "collectives/all_reduce", "raised TypeError"),
    ("NewOptimizerAtSetUp", "capabilities/rebinds optimizers", "with their options, and its state"),
    ("ForwardInForwardOnly", "losses/repeated", "a layer runs in backward"),
    ("LastLossCounts", "life/one rank", "a loss of None for every micro-batch"),
    ("EvaluatesMeanBuffers", "evaluation/saved model", "is chosen by another model's loss"),
    ("SavesMeanBuffers", "evaluation/saved model", "is chosen by another model's loss"),
    ("EvaluatesRankZero", "evaluation/saved model", "and the same average of parameters"),
    ("EvaluationRestartsPeriod", "evaluation/same training", "or a count of steps"),
    ("AveragesOwnGroups", "optimizers/averages", "with two optimizers: count the steps of each"),
    ("CountsOfAllModels", "optimizers/averages", "with two models: count the steps of each"),
    ("AveragesTrainedAtFirst", "optimizers/averages", "with a layer that is unfrozen later"),
    ("AveragesFirstGroup", "optimizers/averages", "with a group of parameters that is added later"),
    ("SlowsOneOptimizer", "optimizers/one as two", "count the steps of each optimizer by itself"),
    ("AverageOfFormerFits", "life/twice", "What evaluation uses (an average of weights) is that"),
    ("RecomputesWithOtherNumbers", "steps/random numbers", "with preserve_rng_state=True"),
    ("CapsByShard", "life/same batches, one rank", "not of the part that a rank has"),
    ("SumsSigns", "life/same batches, one rank", "a sum over ranks has to be divided"),
    ("AveragesInFinishStep", "capabilities/backward in forward", "and not in finish_step or"),
    ("SkipsAlone", "steps/not finite", "Let the ranks agree"),
    ("KeepsAnOverflow", "precisions/scaled loss and clip", "has weights that are not finite"),
    ("StopsAfterAnOverflow", "precisions/scaled loss and clip", "takes no step any more"),
    ("KeepsAMean", "life/memory", "times Node MulBackward0 of a graph"),
    ("KeepsLosses", "life/memory", "of torch.float32[] with the graph of MseLossBackward0"),
    ("SavesAnAverage", "steps/gradient", "model_state(prepared) returns other weights"),
    ("SavesAnAverage", "losses/tied", "and model_state(prepared) returns two different values"),
    ("KeepsErrors", "life/freed", "tensors after two, three and four fits"),
    ("RefusesScaledLosses", "precisions/scaled loss", "Capabilities.precisions is None"),
]
# Whose losses need not be those of single_device.
NOT_EQUAL = (
    *("AveragesUnderTheTrainer", "ForgetsError", "ForgetsCount", "InnerEndsOuterFeedback"),
    *("SaysAlike", "TrainsInEvaluation"),
    *("CountsOfFormerFits", "MultipliesOption", "DropsCountAtEnd"),
    *("OwnRowOfError", "SlowWeights", "StaleSlowWeights"),
    *("KeepsItsError", "ErrorByName"),
    *("RandomHalf", "OtherHalves", "EvaluatesRankZero", "EvaluationRestartsPeriod"),
    *("AveragesOwnGroups", "CountsOfAllModels", "AveragesTrainedAtFirst", "AveragesFirstGroup"),
    *("SlowsOneOptimizer", "CapsByShard", "SumsSigns", "Periodic", "KeepsErrors"),
    *("AnchorsOfTrained", "AveragesForOthersOnly", "DiLoCo"),
    *("DriftsUnclipped", "DriftsClippedByNorm", "DriftsUndivided", "DriftsByTheLast"),
)
# Each in ranks of its own, since what is looked at is their end, or others leave ranks out of step.
AT_THE_END = [
    ("EvaluatesOwnPart", "evaluation/uneven ranks", "it is that of a part of the data"),
    ("BroadcastsInEvaluation", "evaluation/uneven ranks", ""),
    ("EvaluatesByDDP", "evaluation/uneven ranks", "communication before forward failed"),
    ("WaitsForEverybody", "evaluation/uneven ranks", "raised CommunicationError"),
    ("LeaksProcess", "end/nothing left", "left running: "),
    ("TeardownPastBase", "end/nothing left", "let teardown() call super().teardown()"),
    ("TeardownRaises", "end/nothing left", "TeardownRaises.teardown() failed after the run"),
    ("KeepsEnvironment", "end/nothing left", "the environment variable MINE_DONE"),
    ("KeepsSignalHandler", "end/nothing left", "the handler of SIGUSR2"),
    ("OwnRowOfError", "state/other number of ranks", "rank 2 raised IndexError"),
    ("SwallowsException", "end/failing rank", "the exception was swallowed"),
]


def item(name: str, check: str) -> Item:
    equal = name not in NOT_EQUAL
    return Target(strategy=f"{FILE}:{name}", devices=2, data_groups=2, equal=equal), check


def said(outcome: Outcome, check: str) -> str:
    with pytest.raises(AssertionError) as caught:
        outcome.judge(check)
    return str(caught.value)


@pytest.fixture(scope="module")
def outcomes(
    stratagem_reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> dict[Item, Outcome]:
    """What came of all of them, in one pair of ranks; two that are right, too."""
    items = [item(name, check) for name, check, _ in PLANTED]
    items += [item(name, check) for name, check in RIGHT]
    folder = tmp_path_factory.mktemp("planted")
    return run_checks(list(dict.fromkeys(items)), folder, reference=stratagem_reference)


_SOME = ("steps/accumulation and clip", "collectives/all_reduce", "state/exact resume")
RIGHT = [
    *(
        (name, check)
        for name in ("ByHand", "ByBackward", "OtherRanks", "KeepsMasters")
        for check in _SOME
    ),
    *(("DiLoCo", check) for check in ("state/exact resume", "state/exact resume in bf16-true")),
    *(("ByHand", check) for check in ("nodes/two of one rank", "nodes/two of two ranks")),
    *(("SlowWeights", check) for check in ("optimizers/sgd", "state/out of single_device")),
    *(
        ("EvaluatesAverage", check)
        for check in (
            "evaluation/same training",
            "state/exact resume in bf16-true",
            "state/in part",
        )
    ),
    *(
        (name, check)
        for name in ("RandomHalf", "OtherHalves", "Periodic", "SlowWeights")
        for check in (
            "lite/loop",
            "lite/forward before the step",
            "lite/optimizer afterwards",
            "optimizers/averages",
            "optimizers/one as two",
            "evaluation/same training",
            "evaluation/saved model",
            "steps/random numbers",
            "life/same batches",
            "life/same batches, one rank",
            "lite/clip",
            "life/freed",
        )
    ),
]


@pytest.mark.parametrize(("name", "check", "phrase"), PLANTED)
def test_a_planted_bug_is_found_and_named(
    name: str, check: str, phrase: str, outcomes: dict[Item, Outcome]
) -> None:
    text = said(outcomes[item(name, check)], check)
    assert text.startswith(f"{check}: ")
    assert phrase in text


@pytest.mark.parametrize(("name", "check"), RIGHT)
def test_components_without_planted_bugs_pass(
    name: str, check: str, outcomes: dict[Item, Outcome]
) -> None:
    outcomes[item(name, check)].judge(check)


@pytest.mark.parametrize(("name", "check", "phrase"), AT_THE_END)
def test_leftovers_of_a_strategy_are_found(
    name: str, check: str, phrase: str, tmp_path: Path
) -> None:
    one = item(name, check)
    # Of ranks that wait for each other, soon.
    text = said(run_checks([one], tmp_path, deadline=20.0)[one], check)
    assert text.startswith(f"{check}: ")
    assert phrase in text


def test_an_error_that_an_earlier_check_expected_is_not_taken_for_the_cause(
    tmp_path: Path,
) -> None:
    first, second = (item("WaitsWhenPickled", c) for c in ("state/other model", "life/pickled"))
    outcomes = run_checks([first, second], tmp_path)
    outcomes[first].judge("state/other model")  # which ends in an error, as it has to
    text = said(outcomes[second], "life/pickled")
    assert "rank(s) 0 returned nothing, rank(s) 1 did" in text
    assert re.search(r"rank 0 raised RankFailedError: rank 0: .* in __getstate__ ", text)
    assert "rank 1 of 2 failed with exit code 71" in text
    assert "CheckpointMismatchError" not in text


HEAVY = """
import torch
from stratagem.discovery import StrategySpec, hookimpl
from stratagem.strategies import SingleDeviceStrategy

@hookimpl
def stratagem_components():
    return [
        StrategySpec(
            name="heavy",
            target=SingleDeviceStrategy,
            api_version=1,
            summary="Heavy",
            capabilities=SingleDeviceStrategy.capabilities,
        )
    ]
"""
JUDGE = """
import sys
from pathlib import Path
from stratagem_testing.strategies.session import run_checks
from stratagem_testing.strategies.target import Target

if __name__ == "__main__":
    item = Target(strategy="heavy"), "plugin/light import"
    try:
        run_checks([item], Path(sys.argv[1]))[item].judge(item[1])
    except AssertionError as error:
        print(error)
"""


def published(folder: Path, name: str, module: str) -> Path:
    """Return a folder in which a plugin of a name is installed."""
    site = folder / "site"
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{name}_plugin.py").write_text(module)
    entry = f"[stratagem.backends]\n{name} = {name}_plugin\n"
    (metadata / "entry_points.txt").write_text(entry)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: stratagem-core>=0.1\n"
    )
    return site


def test_a_plugin_module_that_imports_torch_is_found(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    site = published(tmp_path, "heavy", HEAVY)
    finished = run_script(
        JUDGE, str(tmp_path / "ranks"), env={"PYTHONPATH": str(site)}, timeout=240
    )
    assert re.match(
        r"plugin/light import: heavy_plugin takes \d+\.\d+ s to import and imports torch\b",
        finished.stdout,
    )


DIVIDED = """
from stratagem.discovery import Capabilities, StrategySpec, hookimpl

@hookimpl
def stratagem_components():
    return [
        StrategySpec(
            name=name,
            target=f"planted_strategies:{name}",
            api_version=1,
            summary="Divided",
            shards=("parameters", "optimizer"),
            capabilities=Capabilities(
                launchers=None,
                one_process=False,
                many_devices=True,
                multi_node=True,
                parameters="divided",
                accepts_existing_optimizers=False,
            ),
        )
        for name in ("Layers", "DividesNothing")
    ]
"""
JUDGE_DIVIDED = """
import sys
from pathlib import Path
from stratagem_testing.strategies.session import run_checks
from stratagem_testing.strategies.target import Target

if __name__ == "__main__":
    for name in ("Layers", "DividesNothing"):
        target = Target(strategy=name, devices=2, data_groups=1)
        item = target, "capabilities/what ranks hold"
        try:
            run_checks([item], Path(sys.argv[1]) / name)[item].judge(item[1])
            print(name, "conforms")
        except AssertionError as error:
            print(name, error)
"""


def test_a_spec_that_says_that_a_model_is_divided_is_measured(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    site = published(tmp_path, "divided", DIVIDED)
    path = os.pathsep.join([str(site), str(FILE.parent)])
    folder = str(tmp_path / "ranks")
    finished = run_script(JUDGE_DIVIDED, folder, env={"PYTHONPATH": path}, timeout=240)
    right, wrong = finished.stdout.splitlines()[:2]
    assert right == "Layers conforms"
    assert wrong.startswith("DividesNothing capabilities/what ranks hold: the spec says shards=")
    assert "has 163601 elements of the parameters, of a model on single_device 163601" in wrong


# The class, and what says of it what its capabilities do not.
UNUSUAL = {
    "Layers": {"data_groups": 1},
    "Periodic": {"data_groups": 2, "equal": False},
    "ErrorFeedback": {"data_groups": 2, "equal": False},
}


@pytest.mark.conformance
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_strategy_that_is_right_passes_all_checks(name: str, tmp_path: Path) -> None:
    told: dict[str, Any] = UNUSUAL[name]
    assert failures(Target(strategy=f"{FILE}:{name}", devices=2, **told), tmp_path) == {}


def test_at_least_thirty_bugs_are_planted() -> None:
    assert len({name for name, _, _ in [*PLANTED, *AT_THE_END]}) >= 30
