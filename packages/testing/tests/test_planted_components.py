"""The kits of components fail those that are wrong on purpose, and say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem_testing import (
    ClusterEnvironmentConformance,
    LauncherConformance,
    PrecisionConformance,
)
from stratagem_testing.components.check import checks_of
from stratagem_testing.components.component import Component
from stratagem_testing.components.server import Server

FILE = Path(__file__).with_name("planted_components.py")
RANKS = [
    {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29747", "NODE_RANK": "0"},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MINE_JOB": "7", "MINE_RESTARTS": "0"},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MINE_NAME": "night"},
    }
    for rank in range(2)
]


class _Environment(ClusterEnvironmentConformance):
    cluster_environment = "plain"
    ranks = RANKS


class _Precision(PrecisionConformance):
    precision = "32-true"


class _Launcher(LauncherConformance):
    launcher = "fork"


OPTIONS = {
    "accelerator": {"tolerance": 1e-5, "devices": 2},
    "precision": _Precision.options(),
    "checkpoint_io": {"kills": 8, "megabytes": 1.0},
    "cluster_environment": _Environment.options(),
    "launcher": _Launcher.options(),
    "logger": {"read": f"{FILE}:read_rows", "library_stays": False},
    "callback": {"changes_training": False},
    "profiler": {},
}

# In place of torch's advice, which is to set weights_only=False.
UNPICKLING = ("safety/nothing executed", "torch refuses to make all of it (the file is another")
# The kind, the class, the check that fails, and what it says.
PLANTED = [
    ("accelerator", "NoReason", "availability/reason", "gives no reason"),
    ("accelerator", "OneDeviceForAll", "devices/identity", "ranks would share one device"),
    ("accelerator", "UnknownBackend", "devices/process group backend", "'mine', and torch"),
    ("accelerator", "LosesBatch", "batches/moved", "part of a nested batch is lost"),
    ("accelerator", "RoundsBatch", "batches/moved", "dtypes are the precision's affair"),
    ("accelerator", "LeaksVariable", "devices/nothing left", "variable MINE_SETUPS"),
    ("accelerator", "NoState", "rng/round trip", "return the device's state"),
    ("accelerator", "EverythingIsMemory", "errors/out of memory", "told to save memory"),
    ("accelerator", "MemoryByWord", "errors/out of memory", "'the replay memory is empty'"),
    ("accelerator", "AlwaysLost", "errors/lost device", "nothing would touch the device"),
    ("accelerator", "FloatBytes", "memory/stats", "expected a whole number of bytes"),
    ("accelerator", "CountsKibibytes", "memory/who holds it", "another unit (/proc has KiB)"),
    (
        "accelerator",
        "KeepsKernels",
        "kernels/restored",
        "torch.backends.cudnn.benchmark: False before",
    ),
    ("accelerator", "ChoosesDevices", "availability/reason", "variable MINE_VISIBLE_DEVICES"),
    ("accelerator", "NeverForks", "availability/reason", "launchers that fork refuse it"),
    ("accelerator", "OneAutocastOfAll", "autocast/context", "return a new context from each call"),
    ("accelerator", "MovesTensors", "batches/moved", "did not call to(device) of a batch"),
    ("accelerator", "MakesDicts", "batches/moved", "the mover returned 'dict' for 'OrderedDict'"),
    ("accelerator", "HoldsHandle", "life/pickled", "make locks, files, connections and threads"),
    ("accelerator", "Pickled", "availability/reason", "subclass stratagem.accelerators"),
    ("accelerator", "KeepsDeterminism", "kernels/restored", "torch.backends.mkldnn.deterministic"),
    ("accelerator", "LeavesMode", "devices/nothing left", "variable MINE_MODE"),
    ("accelerator", "SwapsKernels", "kernels/restored", "the opposite of what it was given"),
    ("accelerator", "StatsInKibibytes", "memory/stats", "it is another unit"),
    ("precision", "KeepsDefaultDtype", "contexts/restored", "the default dtype was"),
    ("precision", "LiesAboutDtype", "conversions/dtype of products", "say in `dtype`"),
    ("precision", "RoundsLabels", "conversions/batches", "labels and masks stay"),
    ("precision", "FlatBatches", "conversions/batches", "and torch.float32 of one in a dict"),
    ("precision", "ForgetsNamedTuples", "conversions/batches", "of a named tuple, which"),
    ("precision", "HidesScaling", "steps/gradient", "scales_loss is False, and scale_loss changes"),
    ("precision", "UnscalesTwice", "steps/clipping", "unscales twice"),
    ("precision", "NeverSkips", "steps/skipped", "a step with gradients of inf was taken"),
    ("precision", "SaysNoSkip", "steps/skipped", "step_was_skipped is False"),
    ("precision", "ForgetsState", "state/round trip", "after load_state_dict the state is"),
    ("precision", "UntiesWeights", "conversions/module", "untied a weight"),
    ("precision", "DropsImaginaryParts", "conversions/module", "without its imaginary parts"),
    ("precision", "ConvertsCopy", "conversions/module", "the user's own would never be trained"),
    ("precision", "ScalesInPlace", "steps/gradient", "changed the loss in place"),
    ("precision", "NeedsAllGradients", "steps/gradient", "'NoneType' object has no attribute"),
    ("precision", "UnscalesAgain", "steps/gradient", "a second unscale_gradients before the step"),
    ("precision", "OneMarkForAll", "steps/two optimizers", "remember for each optimizer whether"),
    ("precision", "AdaptsAtOnce", "steps/two optimizers", "after the first one's was skipped"),
    ("precision", "TakesNaN", "steps/skipped", "a step with gradients of nan was taken"),
    (
        "precision",
        "LastParameterDecides",
        "steps/skipped",
        "a step with gradients of inf was taken",
    ),
    ("precision", "LiveState", "state/round trip", "another step's state"),
    ("precision", "NeverResets", "state/round trip", "after load_state_dict({}) the state is"),
    (
        "precision",
        "ShowsScale",
        "state/round trip",
        "after load_state_dict a loss is multiplied by",
    ),
    ("precision", "ScaleOfTheClass", "state/round trip", "in the object and not in its class"),
    ("precision", "HoldsLock", "life/pickled", "it cannot be pickled (TypeError: cannot pickle"),
    ("precision", "SetsProducts", "life/nothing changed", "the precision of float32 products"),
    ("precision", "EntersAutocast", "life/nothing changed", "autocast was False, and is True"),
    ("precision", "OneAutocast", "contexts/restored", "as of a model in Lite.autocast(), autocast"),
    ("precision", "NewParameters", "conversions/module", "made a new parameter of a batch norm's"),
    ("precision", "ConvertsForEvaluation", "conversions/module", "changed the mode of a layer"),
    ("precision", "ConvertsWhatIsSaved", "conversions/module", "persistent=False"),
    ("precision", "BeginsRounded", "conversions/module", "built in init_context() has weights of"),
    ("precision", "OnlySingle", "conversions/batches", "as NumPy's are float64"),
    ("precision", "ConvertsPixels", "conversions/batches", "made pixels torch.bfloat16"),
    ("precision", "ChangesLists", "conversions/batches", "changes the batch in place"),
    ("precision", "StepIsLeftOut", "steps/gradient", "call only with scales_loss=True"),
    ("precision", "StaleCopies", "training/other weights", "has to be made of them again"),
    ("precision", "NoisyGradient", "steps/gradient", "no step, two of them"),
    (
        "precision",
        "LeavesNewTensors",
        "conversions/dtype of products",
        "tensors that a model makes need the dtype",
    ),
    (
        "precision",
        "MakesSingle",
        "conversions/module",
        "a large model would be made in torch.float32",
    ),
    ("precision", "ReturnsRounded", "conversions/batches", "in which a user computes a loss"),
    (
        "precision",
        "TakesAnyAccelerator",
        "itself/accelerators",
        "raise a ConfigurationError in bind()",
    ),
    ("precision", "NoSparse", "steps/gradient", "where gradient.is_sparse"),
    ("precision", "NeverLowers", "steps/skipped", "no step is ever taken again"),
    ("precision", "LowersTooMuch", "steps/skipped", "small gradients become zero then"),
    ("precision", "GrowsAtOnce", "steps/skipped", "without an overflow only, as after 2000"),
    ("precision", "BeginsAgain", "steps/skipped", "becomes smaller after overflows only"),
    ("precision", "ForgetsWhenToGrow", "state/round trip", "decides when the scale changes"),
    ("checkpoint_io", "Pickled", "safety/nothing executed", "executed code that the checkpoint"),
    ("checkpoint_io", "Pickled", "safety/nothing hostile saved", "weights_only=True"),
    ("checkpoint_io", "Pickled", "values/refused", "was not refused with CheckpointContentError"),
    ("checkpoint_io", "Pickled", "safety/damage", "an interrupted run would"),
    ("checkpoint_io", "Unrestricted", "safety/nothing hostile loaded", "weights_only=True"),
    ("checkpoint_io", "PicklesInside", "safety/nothing unpickled", "it has looked up "),
    ("checkpoint_io", "InPlace", "safety/failed save", "destroyed the checkpoint before"),
    ("checkpoint_io", "NeverSyncs", "durability/fsync", "call os.fsync on each file"),
    ("checkpoint_io", "SyncsTooEarly", "durability/fsync", "flush the file first"),
    ("checkpoint_io", "PassesOnTorchsError", *UNPICKLING),
    ("checkpoint_io", "RemovesNeighbours", "paths/removed", "damaged the checkpoint"),
    ("checkpoint_io", "NamesFiles", "safety/names stay inside", "as names in the checkpoint say"),
    ("checkpoint_io", "NeverCorrupt", "safety/damage", "an interrupted run would choose it"),
    ("checkpoint_io", "NotFoundAsNone", "paths/missing", "expected CheckpointNotFoundError"),
    ("checkpoint_io", "LosesDtype", "values/round trip", "is a tensor of torch.float32"),
    ("checkpoint_io", "EmptiesCheckpoint", "values/round trip", "changed what it was given"),
    ("checkpoint_io", "TextKeys", "values/round trip", "['keys'] has the keys"),
    ("checkpoint_io", "JsonIfItCan", "values/alone", "with integers as keys came back changed"),
    ("checkpoint_io", "RaisesItsOwn", "durability/full disk", "raised OperationalError: disk I/O"),
    ("checkpoint_io", "WholeNumbers", "values/round trip", "['numbers'][1] is int 1, expected"),
    (
        "checkpoint_io",
        "LocksWhenLoading",
        "values/round trip",
        "loading made or removed model.ckpt",
    ),
    ("checkpoint_io", "RemembersLoads", "values/independent", "which no file or cache shares"),
    ("checkpoint_io", "KnowsItsPath", "values/independent", "store no path of its own in it"),
    ("checkpoint_io", "OtherSuffix", "paths/text and Path", "make no other name of a path"),
    ("checkpoint_io", "LooksForNames", "paths/text and Path", "best [1] *.ckpt') cannot be found"),
    ("checkpoint_io", "Adds", "paths/saved again", "of the first checkpoint is there"),
    ("checkpoint_io", "PrivateFiles", "paths/saved again", "has the mode 600, and the umask"),
    ("checkpoint_io", "KeepsFilesOpen", "asynchronous/teardown", "these files are open still"),
    ("checkpoint_io", "OneTemporary", "paths/two runs", "each path and process a temporary"),
    ("checkpoint_io", "LinksOnce", "paths/linked", "a link is replaced by each save"),
    ("checkpoint_io", "LinksFromHere", "paths/linked", "what it names is beside it"),
    ("checkpoint_io", "HoldsConnection", "life/pickled", "connections and threads where"),
    ("checkpoint_io", "RemovesPathsOnly", "paths/text and Path", "has no attribute 'unlink'"),
    ("cluster_environment", "TextRanks", "ranks/consistent", "expected int"),
    ("cluster_environment", "EveryoneIsZero", "ranks/consistent", "global_rank() is 0, and"),
    ("cluster_environment", "ReadsOnce", "ranks/read when asked", "and not in __init__"),
    ("cluster_environment", "NeedsVariables", "ranks/read when asked", "ended in KeyError"),
    ("cluster_environment", "StartsAgain", "ranks/started by the cluster", "start further ones"),
    ("cluster_environment", "OwnPort", "meeting/main address and port", "and rank 1 at"),
    ("cluster_environment", "SetsVariables", "life/nothing changed", "MINE_WORLD_SIZE"),
    ("cluster_environment", "LeavesThread", "life/nothing changed", "the thread mine"),
    ("cluster_environment", "OwnRunID", "life/same for all", "differ by rank"),
    ("cluster_environment", "RunOfTheProcess", "life/same for all", "not from the process"),
    ("cluster_environment", "RaisesValueError", "ranks/not a number", "'two' ended in ValueError"),
    ("cluster_environment", "PortOfTheJob", "meeting/main address and port", "MINE_JOB=65540"),
    ("cluster_environment", "PortOfTheHash", "meeting/main address and port", "as hash() does"),
    ("cluster_environment", "RunOfTheTime", "life/same for all", "differ by rank"),
    ("cluster_environment", "AgentOfTheProcess", "life/same for all", "agent_id differs by rank"),
    ("cluster_environment", "OneRunForAll", "life/same for all", "whatever the variables of the"),
    (
        "cluster_environment",
        "RunOfTheStart",
        "life/same for all",
        "keeps its id when it is restarted",
    ),
    ("cluster_environment", "HoldsSocket", "life/pickled", "it cannot be pickled"),
    (
        "cluster_environment",
        "PortOfTheName",
        "meeting/main address and port",
        "in a job with MINE_NAME=night",
    ),
    (
        "cluster_environment",
        "PortOfTheLaunch",
        "meeting/main address and port",
        "made before the variables",
    ),
    (
        "cluster_environment",
        "MeetsAtHome",
        "meeting/main address and port",
        "in MASTER_ADDR: ranks",
    ),
    ("cluster_environment", "RemembersRestarts", "ranks/read when asked", "MINE_RESTARTS=01 was"),
    ("cluster_environment", "RemembersRun", "ranks/read when asked", "and keep nothing"),
    ("cluster_environment", "AgentOfTheStart", "life/same for all", "the agent outlives the ranks"),
    ("logger", "WritesAtOnce", "life/nothing logged", "begin with the first value"),
    ("logger", "HoldsBack", "rows/flushed", "after a kill behind log_rows"),
    ("logger", "BeginsAnew", "life/continued", "after a run that was resumed the run has"),
    ("logger", "DropsNew", "rows/values", "each step with its own values"),
    ("logger", "OneRowOfAStep", "rows/of one step", "and is no repetition"),
    ("logger", "RefusesNaN", "rows/not finite", "NaN and infinity ended in AssertionError"),
    ("logger", "ClosesForGood", "life/finalized twice", "a second finalize ended in ValueError"),
    ("logger", "StrictJSON", "hyperparameters/taken", "write the text of what cannot be stored"),
    ("logger", "RoundsValues", "rows/names and digits", "write all digits"),
    ("logger", "PlainText", "rows/names and digits", "is taken for several"),
    ("logger", "TakesFromRows", "rows/values", "other loggers get them, too"),
    ("logger", "GoesForward", "rows/of one step", "after a row of step 3, rows of the steps 0"),
    ("logger", "StaysOpen", "rows/values", "metrics.csv: end it there"),
    ("logger", "LeavesSender", "rows/values", "the thread sender"),
    ("logger", "BeginsAnewWithRun", "trainer/a resumed run", "has rows of the steps [4, 5, 6, 7]"),
    ("logger", "OnceOnly", "hyperparameters/taken", "a second log_hyperparams, of a second fit"),
    ("logger", "CutsTooMuch", "trainer/a resumed run", "then those of step 4 and later"),
    ("logger", "HoldsQueue", "life/pickled", "make locks, files, connections and threads where"),
    ("callback", "WritesWhenMade", "life/made", "making a callback wrote steps.txt"),
    ("callback", "MisspellsHook", "life/hooks", "did you mean on_train_epoch_end?"),
    ("callback", "OtherArguments", "life/hooks", "OtherArguments.on_validation_end("),
    ("callback", "LeavesWatcher", "runs/every stage", "the thread watcher"),
    ("callback", "DrawsNumbers", "runs/same training", "a run ends with other weights"),
    ("callback", "FailsAfterError", "runs/a run that fails", "could not send a message"),
    ("callback", "SavesItself", "state/plain", "a checkpoint takes weights-only-safe data"),
    ("callback", "RefersToWeights", "state/plain", "has the model's own weights"),
    ("callback", "ForgetsTheBest", "state/resumed", "a resumed run ends with other weights"),
    ("callback", "OtherKeyEachTime", "state/plain", "finds no state under another name"),
    ("callback", "ForgetsSteps", "state/resumed", "a resumed run ends with other weights"),
    ("callback", "ResetsAtStart", "state/resumed", "state_dict() has 'steps': 4, expected 8"),
    ("callback", "NeedsTraining", "runs/every stage", "has no attribute 'best'"),
    ("callback", "NeedsFit", "runs/every stage", "a validation without a fit before ended in"),
    ("callback", "NeedsTarget", "runs/every stage", "ended in"),
    ("callback", "DrawsOnly", "runs/same training", "it draws random numbers"),
    ("callback", "DrawsFromPython", "runs/same training", "it draws random numbers"),
    ("callback", "LeavesEvaluation", "runs/same training", "or its mode (eval())"),
    ("callback", "ScalesMetrics", "runs/same training", "the logged value 'val_loss' is"),
    ("callback", "AllWrite", "runs/two ranks", "both ranks write to steps.txt"),
    ("callback", "StopsAlone", "runs/two ranks", "they have to decide together"),
    ("callback", "HoldsFile", "life/pickled", "make locks, files, connections and threads where"),
    ("callback", "ForgetsLosses", "state/resumed", "after a resume the callback has recent"),
    ("callback", "LoadsNothing", "state/resumed", "when a resumed run begins, state_dict() has"),
    (
        "callback",
        "SavesAgain",
        "state/resumed",
        "after a resume the callback has saved a checkpoint",
    ),
    ("callback", "ForgetsAverage", "state/resumed", "holds other values at ['average']['net.0"),
    ("callback", "NeedsLoss", "runs/every stage", "gets {'loss': None} then"),
    ("profiler", "OneAtATime", "actions/nested", "actions within an action ended in ValueError"),
    ("profiler", "NumbersAsReport", "actions/nested", "expected a str"),
    ("profiler", "LosesResults", "actions/passed through", "expected its own result"),
    ("profiler", "DoublesLoss", "runs/same training", "ends with other weights"),
    ("profiler", "LeavesSampler", "runs/nothing left", "the thread sampler"),
    ("profiler", "KeepsOpenActions", "runs/a run that fails", "forget open actions"),
    ("profiler", "FixedName", "reports/file", "does not begin with the stage"),
    ("profiler", "NeverForgets", "reports/each of its own", "forget them in `teardown`"),
]
# These start processes or kill them, for seconds each.
SLOW = [
    ("checkpoint_io", "InPlace", "durability/kill -9", "runs went wrong"),
    ("cluster_environment", "EveryoneIsZero", "meeting/sum over ranks", "the ranks came to"),
    ("launcher", "OneRank", "launch/ranks", "wait for one that was not started"),
    ("launcher", "OneRank", "itself/spec and class", ""),
    ("launcher", "Scaled", "itself/spec and class", "subclass stratagem.launch.Launcher"),
    ("launcher", "LeavesProcess", "launch/ranks", "was over: sleep 300"),
    ("launcher", "JoinsAll", "failure/error of a rank", "end the others then"),
    ("launcher", "JoinsAll", "signals/SIGKILL", "to the launching process these run on"),
    ("launcher", "SwallowsFailure", "failure/error of a rank", "ended with exit code 0"),
    ("launcher", "SwallowsFailure", "failure/a rank that is killed", "ended with exit code 0"),
    ("launcher", "LosesResult", "launch/result", "where the function had returned"),
    ("launcher", "KeepsTruth", "launch/ranks", "launch returned None where the function had"),
    ("launcher", "LeavesHandler", "launch/ranks", "the handler of SIGUSR1"),
    ("launcher", "LeavesFile", "launch/ranks", "in the folder for temporary files"),
    ("launcher", "DropsVariables", "launch/ranks", "which the program had set"),
    ("launcher", "OtherFolder", "launch/ranks", "relative paths would mean others"),
    ("launcher", "FixedPort", "launch/ranks", "two launches have the port MASTER_PORT=29748"),
    ("launcher", "ThroughJSON", "launch/ranks", "ended with exit code 1"),
    ("launcher", "AnyError", "failure/error of a rank", "raised no RankFailedError"),
    ("launcher", "UnpicklesResult", "launch/result not executed", "was unpickled in the launching"),
]


def judge(server: Server, kind: str, name: str, check: str, phrase: str) -> None:
    component = Component(kind=kind, name=f"{FILE}:{name}", options=OPTIONS[kind])
    failure = server.failure(component, check, 240.0)
    if not phrase:
        assert failure == ""
        return
    assert failure.startswith(f"{check}: ")
    assert phrase in failure


@pytest.mark.parametrize(("kind", "name", "check", "phrase"), PLANTED)
def test_a_planted_bug_is_found_and_named(
    kind: str, name: str, check: str, phrase: str, stratagem_server: Server
) -> None:
    judge(stratagem_server, kind, name, check, phrase)


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name", "check", "phrase"), SLOW)
def test_a_planted_bug_of_processes_is_found_and_named(
    kind: str, name: str, check: str, phrase: str, stratagem_server: Server
) -> None:
    judge(stratagem_server, kind, name, check, phrase)


@pytest.mark.parametrize(
    ("kind", "name", "check"),
    [
        ("accelerator", "HostNumbers", "rng/round trip"),
        ("accelerator", "CountsBytes", "memory/who holds it"),
        ("precision", "Scaled", "steps/skipped"),
        ("precision", "Scaled", "steps/clipping"),
        *(("precision", "Grows", check) for check in checks_of("precision")),
        ("precision", "Dynamic", "steps/skipped"),
        ("precision", "Dynamic", "state/round trip"),
        ("callback", "_Recent", "state/resumed"),
        ("logger", "Rows", "rows/values"),
        ("logger", "Rows", "rows/of one step"),
        ("checkpoint_io", "Compresses", "durability/full disk"),
        ("callback", "CountsSeconds", "state/resumed"),
        *(("callback", "Counts", check) for check in checks_of("callback")),
        *(("profiler", "Times", check) for check in checks_of("profiler")),
    ],
)
def test_components_without_planted_bugs_pass(
    kind: str, name: str, check: str, stratagem_server: Server
) -> None:
    component = Component(kind=kind, name=f"{FILE}:{name}", options=OPTIONS[kind])
    assert stratagem_server.failure(component, check) == ""


# ---------------------------------------------------------------- plugins

GOOD = """
from stratagem.discovery import LauncherSpec, StrategySpec, hookimpl

@hookimpl
def stratagem_components():
    target = "stratagem.one_device.strategy:SingleDeviceStrategy"
    return [StrategySpec(name="mine", target=target, api_version=1, summary="Mine")]
"""
REQUIRES = "stratagem-core>=0.1,<0.2"
# What is changed in the module, the requirement, the check, and what it says.
PLUGINS = {
    "nothing": ("", "", REQUIRES, "specs/summary and version", ""),
    "torch": ("from", "import torch\nfrom", REQUIRES, "import/light", "and imports torch"),
    "slow": (
        "from",
        "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass\n"
        "from",
        REQUIRES,
        "import/light",
        "of processor time",
    ),
    "prints": (
        "from",
        "import os\nos.environ['MINE'] = '1'\nprint('hello')\nfrom",
        REQUIRES,
        "import/no side effects",
        "changes environment variables; what it prints",
    ),
    "unbounded": ("", "", "stratagem-core>=0.1", "metadata/requirement on core", "next minor"),
    "none": ("", "", "", "metadata/requirement on core", "requires no release"),
    "one": ("", "", "stratagem-core==0.1.0", "metadata/requirement on core", "one release"),
    "wide": ("", "", "stratagem-core<9,>=0.1", "metadata/requirement on core", "next minor"),
    "target": (":SingleDevice", ":NoDevice", REQUIRES, "specs/targets", "cannot import strategy"),
    "kind": ("StrategySpec(", "LauncherSpec(", REQUIRES, "specs/targets", "is no Launcher"),
    "alias": (
        'name="mine"',
        'name="mine", aliases=("mine2",)',
        REQUIRES,
        "specs/names",
        "",
    ),
    "function": (
        "api_version=1",
        "api_version=1, incompatible_because='stratagem.one_device.precision:TruePrecision'",
        REQUIRES,
        "import/light",
        "a function that a spec names runs while a request is resolved",
    ),
    "twice": (
        "return [",
        "return 2 * [",
        REQUIRES,
        "specs/names",
        "the strategy name 'mine' twice",
    ),
    "summary": ('"Mine"', '""', REQUIRES, "specs/summary and version", "has no summary"),
    "version": ("version=1", "version=7", REQUIRES, "specs/summary and version", "is incompatible"),
    "capabilities": (
        "api_version=1",
        "api_version=1, capabilities=Capabilities(multi_node=True)",
        REQUIRES,
        "specs/as the class",
        "differ: multi_node is True in the spec",
    ),
}


@pytest.mark.parametrize("which", PLUGINS)
def test_a_planted_bug_of_a_plugin_is_found_and_named(
    which: str, tmp_path: Path, stratagem_server: Server
) -> None:
    before, after, requires, check, phrase = PLUGINS[which]
    module = f"planted_{which}_plugin"
    text = GOOD.replace("import LauncherSpec", "import Capabilities, LauncherSpec")
    text = text.replace(before, after, 1) if before else text
    (tmp_path / f"{module}.py").write_text(text)
    metadata = tmp_path / "planted-1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(f"[stratagem.backends]\nplanted = {module}\n")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: planted\nVersion: 1.0\nRequires-Dist: {requires}\n"
    )
    component = Component(
        kind="plugin",
        name="planted",
        options={"cpu_seconds": 0.3},
        search_path=(str(tmp_path),),
    )
    failure = stratagem_server.failure(component, check)
    if not phrase:
        assert failure == ""
        return
    assert failure.startswith(f"{check}: ")
    assert phrase in failure
