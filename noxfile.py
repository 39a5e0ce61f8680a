"""Every command that CI runs: `python -m pip install nox && python -m nox -s tests`.

Each session makes an environment of its own with pip. torch comes first and pinned, so that nothing
else chooses its build. CONTRIBUTING.md and docs/design/sessions.md list the sessions.
"""

import os
import shutil
import time
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True

TORCH = "torch==2.13.0"
PACKAGES = [
    "packages/core",
    "packages/backend-torch",
    "packages/backend-cuda",
    "packages/backend-deepspeed",
    "packages/backend-xla",
    "packages/backend-hpu-ipu",
    "packages/backend-mps",
    "packages/backend-xpu",
    "packages/mesh",
    "packages/extras",
    "packages/lightning",
    "packages/testing",
    "packages/stratagem",
]
# What is typed for macOS and Windows too.
ON_ANY_SYSTEM = [
    "core",
    "backend-torch",
    "extras",
    "lightning",
    "backend-cuda",
    "backend-mps",
    "backend-xpu",
    "mesh",
]
# What Lightning's names stand on, for the sessions beside Lightning itself.
AS_LIGHTNING = [
    f"./packages/{name}"
    for name in ("core", "backend-torch", "extras", "lightning", "backend-cuda")
]
# What builds a package of ours; installed once, so that no build fetches it again.
BUILD_TOOLS = ["build==1.6.1", "editables==0.6", "hatchling==1.33.0"]
# Pinned, so that CI does not break by itself.
TEST_TOOLS = [
    "hypothesis==6.170.15",
    "import-linter==2.16",
    "ipykernel==7.4.0",
    "jsonargparse[signatures]==4.53.0",
    "mypy==2.4.1",
    "nbclient==0.11.0",
    "nox==2026.10.20",
    "numpy==2.4.6",
    "omegaconf==2.3.1",
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "ruff==0.17.5",
    "safetensors==0.8.0",
    "scikit-learn==1.9.1",
    "tensorboard==2.21.0",
    "torchmetrics==1.9.0",
    "tqdm==4.70.1",
    # An S3-compatible server and its client: moto with what serves S3 alone, 130 MB in all.
    "flask==3.1.3",
    "flask-cors==6.0.5",
    "moto[s3]==5.2.5",
    "s3fs==2026.9.0",
]
# Installed without their dependencies: float8, 4 and 8 bits on the CPU, and optimizers.
LOW_PRECISIONS = ["bitsandbytes==0.50.2", "schedulefree==1.4.1", "torchao==0.18.0"]
# The last torchao for torch 2.9.
LOW_PRECISIONS_2_9 = ["bitsandbytes==0.50.2", "schedulefree==1.4.1", "torchao==0.17.0"]
# One file of tests on each of two processes.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile")
# Small models wait for their threads most of the time.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TRANSFORMERS = "transformers==5.23.0"
PEFT = "peft==0.21.2"
TRL = ["trl==1.16.0", "datasets==5.2.0"]
LM_EVAL = "lm-eval==0.4.13"
# What builds the site of the documentation, and what its pages train beside.
SITE = [
    "furo==2025.12.19",
    "myst-parser==5.2.0",
    "sphinx==9.0.4",
    "sphinx-copybutton==0.5.2",
    TRANSFORMERS,
    "optuna==5.0.0",
    PEFT,
]
# What CI leaves to sessions of their own.
IN_CI = " and ".join(
    f"not {marker}"
    for marker in ("gpu", "cluster", "ops", "xla", "conformance", "long", "skew", "guide")
)
MPI = "mpi4py==4.1.2"
RAY = "ray==2.60.0"
DEEPSPEED = "deepspeed==0.19.8"
# A pair: torch_xla needs the torch of its own number. 4 GB to fetch, 7 GB on the disk.
XLA = ["torch==2.9.0", "torch_xla==2.9.0"]
# Core takes torch from 2.9 on; CI tries the newest that pip may install, up to the last one tried.
NEWEST = "torch>=2.14.1,<2.16"
TORCH_VERSIONS = ["2.9.1", "2.11.0", "2.13.0", "2.15.0"]
# What leans on the insides of torch, in some minutes: what CI runs with the oldest and the newest.
TORCH_TESTS = [
    "packages/backend-torch/tests/strategies/test_changes_between_steps.py",
    "packages/backend-torch/tests/strategies/test_ddp_options.py",
    "packages/backend-torch/tests/strategies/test_ddp_sharded.py",
    "packages/backend-torch/tests/checkpoint/test_directory.py",
    "packages/backend-torch/tests/launch/test_end_of_rank.py",
    "packages/backend-torch/tests/strategies/test_fsdp.py",
    "packages/backend-torch/tests/strategies/test_fsdp_manual.py",
    "packages/core/tests/lite/test_lite.py",
    "packages/core/tests/checkpoint/test_saved_before.py",
    "tests/test_readme.py",
]
WHEEL_TESTS = [
    "tests/test_broken_plugins.py",
    "tests/test_core_alone.py",
    "tests/test_third_party.py",
    "tests/test_wheels.py",
]
# What the session `cluster` brings clusters up with.
DEBIAN = ["slurmctld", "slurmd", "slurm-client", "openmpi-bin", "iproute2", "util-linux"]
# What the example plugins stand on, in the order in which it is installed. Each plugin's
# constraints.txt has the versions, also of what these bring.
THIRD_PARTIES = {
    "torchft": [
        ["--no-deps", "torchft-nightly"],
        ["opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"],
    ],
    "hivemind": [["hivemind"]],
    # It pins torch<=2.5.1, and what it imports is a part of what it names.
    "colossalai": [
        ["setuptools", "wheel", "ninja", "psutil", "einops", "pydantic", "safetensors", "rich"],
        ["--no-deps", "contexttimer", "galore_torch", "bitsandbytes", "accelerate"],
        ["peft", "transformers"],
        ["--no-deps", "--no-build-isolation", "colossalai"],
    ],
    "bagua": [],  # not installable: against a stub
    "onebit": [],  # needs no library
}
# What loggers log to. MLflow's own store needs SQLAlchemy, whose 2.1 it uses in a deprecated way.
LOGGERS = [
    "mlflow-skinny==3.17.2",
    "sqlalchemy<2.1",
    "alembic",
    "wandb==0.31.0",
    "comet_ml==3.58.8",
    "neptune==1.14.0.post2",
]
# What stands on Lightning, as `benchmarks/libraries.py` calls it; each chooses its own torch.
LIBRARIES = [
    "neuralforecast==3.3.0",
    "gluonts[torch]==0.17.0",
    "scvi-tools==1.4.2",
    "pytorch-tabular==1.2.0",
    "chemprop==2.3.1",
    "u8darts[torch]==0.41.0",
    "anomalib==2.7.0",
    "torch_geometric==2.8.1",
    "lightly==1.6.0",
    "pytabkit[models]==1.7.3",
    "pina-mathlab==0.3.2.post2610",
    "pytorch-lifestream==0.7.0",
    "rl4co==0.7.0",
    "torchgeo==0.8.1",
    "pytorch-forecasting==1.8.0",
    "optuna-integration[pytorch_lightning]==5.0.0",
    "contextualized-ml==0.2.9",
    "deeptab==2.1.0",
    "ts3l==0.70",
    "disent==0.8.0",
    "tensorneko==0.3.25",
    "neuralprophet==0.9.0",
    "torchphysics==1.1.2",
    "rectools[torch]==0.17.0",
    "drvi-py==0.2.8",
    "cph-regression==0.1.1",
    "torchdyn==1.0.6",
    "mlcolvar==1.3.1",
    "graph-pes==1.0.2",
    "neural-amp-modeler==0.13.0",
    "nequip==0.19.1",
    "litgpt==0.5.13",
    "dvclive==3.49.1",
    "mlflow==3.17.2",
    "cellarium-ml==0.0.15",
    "replay-rec==0.22.0",
    "kaiko-eva==0.4.5",
    "lightning-ir==0.0.6",
]
PEERS = ["lightning==2.6.6", "accelerate==1.15.0"]
# Whose tests of public behaviour are run through stratagem_lightning, and what they need.
PEER_TESTS = "2.6.5"
PEER_TOOLS = ["pytest-timeout", "lightning-utilities", "pandas", "cloudpickle", "psutil"]


def tools(*names: str) -> list[str]:
    """Those of TEST_TOOLS, as they are pinned."""
    return [tool for tool in TEST_TOOLS if tool.partition("==")[0] in names]


def install_everything(session: nox.Session, torch: str = TORCH) -> None:
    """Torch, the tools, then the packages from the source tree, editable."""
    session.install(torch)
    session.install(*BUILD_TOOLS, *TEST_TOOLS)
    low_precisions = LOW_PRECISIONS_2_9 if torch.startswith("torch==2.9.") else LOW_PRECISIONS
    session.install("--no-deps", *low_precisions)
    session.install(DEEPSPEED)  # a source distribution, built in an environment of its own
    editable = [argument for package in PACKAGES for argument in ("-e", f"./{package}")]
    session.install("--no-build-isolation", *editable)


def install_core(session: nox.Session, *torch: str) -> None:
    """A torch, what TORCH_TESTS need, and core with extras, kits and XLA backend, editable."""
    session.install(*torch)
    session.install(*BUILD_TOOLS, *tools("numpy", "pytest", "pytest-xdist", "safetensors"))
    names = ("core", "backend-torch", "extras", "testing", "backend-xla")
    editable = [argument for name in names for argument in ("-e", f"./packages/{name}")]
    session.install("--no-build-isolation", *editable)


def is_root() -> bool:
    """Whether this process may make hosts and install packages."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def install_packages(session: nox.Session, *packages: str) -> None:
    """Install packages of Debian."""
    session.run("apt-get", "update", external=True)
    session.run("apt-get", "install", "-y", "--no-install-recommends", *packages, external=True)


def check_lint(session: nox.Session) -> None:
    """Style and format."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    """Types of the sources and of this file, then of each folder of tests and scripts."""
    session.run("mypy")
    for system in ("darwin", "win32"):
        # As if it ran there: what this system alone has is an error.
        sources = (f"packages/{name}/src" for name in ON_ANY_SYSTEM)
        session.run("mypy", "--platform", system, *sources)
    folders = [f"{package}/{kind}" for package in PACKAGES for kind in ("tests", "scripts")]
    folders += ["tests", "examples", "benchmarks", "docs/tools"]
    for folder in folders:
        # One at a time: modules of the same name live in several of these folders.
        if any(Path(folder).glob("*.py")):
            session.run("mypy", folder)
    for plugin in sorted(Path("examples/plugins").glob("*/src")):
        tests = map(str, sorted(plugin.parent.glob("tests/*.py")))
        session.run("mypy", str(plugin), *tests)


def check_contracts(session: nox.Session) -> None:
    """Who may import whom."""
    session.run("lint-imports", "--no-logo")


def run_pytest(session: nox.Session, markers: str, *options: str) -> None:
    """Pytest on the tests that `markers` selects, with this session's further arguments."""
    options = ("-m", markers, *options, *session.posargs)
    session.run("pytest", *options, env=ONE_THREAD)


def run_unit(session: nox.Session, torch: str = TORCH) -> None:
    """The tests without the wheels, with a torch."""
    install_everything(session, torch)
    run_pytest(session, f"{IN_CI} and not wheels", *TWO_AT_ONCE)


def run_xla(session: nox.Session, *options: str) -> None:
    """The tests of the XLA backend that need torch_xla."""
    session.run("pytest", "-m", "xla", "packages/backend-xla/tests", *options)


def run_script(session: nox.Session, script: str, *needed: str) -> None:
    """A script beside core and the torch backend, with this session's further arguments."""
    session.install(TORCH)
    session.install("./packages/core", "./packages/backend-torch", *needed)
    session.run("python", script, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole check: lint, types, contracts, then every test that needs no GPU and no cluster."""
    install_everything(session)
    check_lint(session)
    check_types(session)
    check_contracts(session)
    run_pytest(session, f"{IN_CI} and not wheels", *TWO_AT_ONCE)


@nox.session
def oldest(session: nox.Session) -> None:
    """What leans on the insides of torch, with the oldest one: that of torch_xla, and its tests."""
    install_core(session, *XLA)
    session.run("pytest", *TWO_AT_ONCE, *TORCH_TESTS, *session.posargs, env=ONE_THREAD)
    run_xla(session)


@nox.session
def newest(session: nox.Session) -> None:
    """The same, with the newest torch, and with triton as a user gets it."""
    install_core(session, NEWEST)
    session.run("pytest", *TWO_AT_ONCE, *TORCH_TESTS, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("torch", TORCH_VERSIONS)
def torch_versions(session: nox.Session, torch: str) -> None:
    """The tests without the wheels, with the versions of torch that core takes; not in CI."""
    run_unit(session, f"torch=={torch}")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and ruff's format."""
    session.install(*tools("ruff"))
    check_lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Types, by mypy --strict."""
    install_everything(session)
    check_types(session)


@nox.session
def contracts(session: nox.Session) -> None:
    """Who may import whom, by import-linter."""
    install_everything(session)
    check_contracts(session)


@nox.session
def unit(session: nox.Session) -> None:
    """The tests without the wheels; what follows `--` goes to pytest."""
    run_unit(session)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds the wheels and installs each alone in an empty environment."""
    session.install(TORCH)
    session.install(*BUILD_TOOLS, *tools("numpy", "pytest", "pytest-xdist", "scikit-learn"))
    names = ("core", "backend-torch", "extras", "testing")
    editable = [argument for name in names for argument in ("-e", f"./packages/{name}")]
    session.install("--no-build-isolation", *editable)
    run_pytest(session, "wheels", *TWO_AT_ONCE, *WHEEL_TESTS)


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU."""
    install_everything(session)
    run_pytest(session, "gpu")


@nox.session
def deepspeed_ops(session: nox.Session) -> None:
    """DeepSpeedCPUAdam and NVMe offload; building their ops takes minutes the first time."""
    if is_root() and not (Path("/usr/include/libaio.h").exists() and shutil.which("g++")):
        install_packages(session, "g++", "libaio-dev")
    install_everything(session)
    run_pytest(session, "ops")


@nox.session
def xla(session: nox.Session) -> None:
    """PyTorch/XLA on PJRT's CPU client, in an environment with its own torch."""
    install_core(session, *XLA)
    run_xla(session, *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """The kits on all our components, and planted bugs; CI has ddp, and the quick ones."""
    install_everything(session)
    run_pytest(session, "conformance")


@nox.session
def long(session: nox.Session) -> None:
    """Tests that CI leaves out for their time: matrices, of which CI has the parts; memory."""
    install_everything(session)
    run_pytest(session, "long", *TWO_AT_ONCE)


@nox.session
def ray(session: nox.Session) -> None:
    """The example plugin for Ray, on real Ray: one machine, the kit, and (as root) two hosts."""
    session.install(TORCH)
    names = ("hatchling==", "editables==", "numpy==", "pytest==")
    tools = [tool for tool in (*BUILD_TOOLS, *TEST_TOOLS) if tool.startswith(names)]
    session.install(*tools, RAY)
    packages = ("core", "backend-torch", "backend-cuda", "extras", "testing")
    folders = (*(f"./packages/{name}" for name in packages), "./examples/plugins/stratagem-ray")
    session.install("--no-build-isolation", *(part for path in folders for part in ("-e", path)))
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    markers = () if root else ("-m", "not cluster")  # two hosts are made by root only
    session.run("pytest", *markers, "examples/plugins/stratagem-ray/tests", *session.posargs)


@nox.session
@nox.parametrize("plugin", list(THIRD_PARTIES))
def third_parties(session: nox.Session, plugin: str) -> None:
    """The example plugins on the real systems that they bring, each with the kit; not in CI."""
    folder = f"examples/plugins/stratagem-{plugin}"
    if THIRD_PARTIES[plugin]:
        session.env["PIP_CONSTRAINT"] = f"{folder}/constraints.txt"
    session.install(TORCH)
    session.install(*BUILD_TOOLS, *tools("numpy", "pytest"))
    for arguments in THIRD_PARTIES[plugin]:
        session.install(*arguments, env={"CUDA_EXT": "0"})
    names = ("core", "backend-torch", "extras", "testing")
    ours = [argument for name in names for argument in ("-e", f"./packages/{name}")]
    session.install("--no-build-isolation", *ours)
    session.install("--no-build-isolation", "--no-deps", "-e", f"./{folder}")
    session.chdir(folder)  # whose own settings of pytest hold: their warnings are not ours
    session.run("pytest", "tests", *session.posargs)


@nox.session
@nox.parametrize("library", LIBRARIES)
def libraries(session: nox.Session, library: str) -> None:
    """A library that stands on Lightning, with it and with `stratagem_lightning`; not in CI."""
    # pandas 3 has no monthly frequency "M", and pyarrow 26 no use for the NumPy 1 that
    # pytorch-lifestream asks for; pytorch-tabular imports requests, disent matplotlib, and
    # tensorneko tensorboard, without naming it; lightning-ir does not load with transformers 5.
    session.env["PIP_CONSTRAINT"] = "benchmarks/libraries.txt"
    name = library.partition("==")[0]
    session.install(library, "lightning", "requests", "matplotlib")
    if name == "lightning-ir":
        session.install("transformers<5")
    if name == "tensorneko":
        # Only there, since Lightning logs to it by default where it is installed.
        session.install(*tools("tensorboard"))
    session.install(*BUILD_TOOLS)
    editable = [argument for package in AS_LIGHTNING for argument in ("-e", package)]
    session.install("--no-build-isolation", *editable)
    session.run("python", "benchmarks/libraries.py", name)


@nox.session
def skew(session: nox.Session) -> None:
    """Core with the example plugins of the commit before, or of the one that follows `--`."""
    session.install(TORCH)
    session.install(*BUILD_TOOLS, *tools("pytest", "scikit-learn"))
    commit = {"STRATAGEM_SKEW_COMMIT": session.posargs[0]} if session.posargs else {}
    session.run("pytest", "-m", "skew", "tests/test_skew.py", env=commit)


@nox.session
def loggers(session: nox.Session) -> None:
    """Loggers on the libraries that they write through, and the command line; not in CI."""
    install_everything(session)
    session.install(*LOGGERS)
    names = ("service_loggers", "conformance", "trainer_cli")
    files = [f"packages/extras/tests/test_{name}.py" for name in names]
    files.append("packages/lightning/tests/test_command_line.py")
    session.run("pytest", *files, *session.posargs)


@nox.session
def accelerate(session: nox.Session) -> None:
    """Accelerate's examples and their conversions to Lite: the same numbers; not in CI."""
    install_everything(session)
    session.install(PEERS[1])
    files = ("tests/test_from_accelerate.py", "packages/core/tests/lite/test_from_accelerate.py")
    session.run("pytest", *files, *session.posargs)


@nox.session
def huggingface(session: nox.Session) -> None:
    """Conversions of scripts of transformers.Trainer, its models and their weights; not in CI."""
    install_everything(session)
    session.install(TRANSFORMERS, PEFT, LM_EVAL, PEERS[1], *TRL)
    mesh = [f"packages/mesh/tests/{room}" for room in ("check", "context", "tensor")]
    extras = [
        f"packages/extras/tests/{name}"
        for name in (
            *("language", "test_adapters_transformers.py", "test_evaluate.py"),
            "test_pretrained_transformers.py",
        )
    ]
    files = ("tests/test_from_huggingface.py", "tests/test_examples.py", *extras, *mesh)
    session.run("pytest", *files, *session.posargs)


@nox.session
def peer_tests(session: nox.Session) -> None:
    """Lightning's tests of public behaviour through stratagem_lightning: a table; not in CI."""
    work = Path(session.posargs[0] if session.posargs else session.create_tmp()).resolve()
    source, theirs = work / "src", str(work / "peer" / "bin" / "python")
    if not source.exists():
        place = "https://github.com/Lightning-AI/pytorch-lightning"
        options = ("-q", "--depth=1", f"--branch={PEER_TESTS}")
        session.run("git", "clone", *options, place, str(source), external=True)
    named = ("jsonargparse[signatures]", "numpy", "pytest", "scikit-learn", "tensorboard")
    needed = [TORCH, *tools(*named, "torchmetrics", "tqdm"), *PEER_TOOLS]
    session.run("python", "-m", "venv", str(work / "peer"))
    # Theirs in an environment of its own, since both answer to its name.
    pip = (theirs, "-m", "pip", "install", "-q", f"lightning=={PEER_TESTS}", *needed)
    session.run(*pip, external=True)
    # Modules of its tests make a CUDAAccelerator and an MPSAccelerator.
    session.install(*needed, *AS_LIGHTNING, "./packages/backend-mps")
    for arguments in (
        ("select", str(source), str(work)),
        ("run", str(work), "peer", "--python", theirs),
        ("run", str(work), "stratagem"),
        ("table", str(work)),
    ):
        session.run("python", "benchmarks/peer_tests.py", *arguments)


@nox.session
def cluster(session: nox.Session) -> None:
    """Real SLURM, mpirun and torchrun, and bad networks, over two hosts on this machine."""
    if not is_root():
        session.warn(
            "not root: no hosts can be made on this machine, so that all tests with SLURM and with "
            "networks are skipped; torchrun and mpirun (if it is installed) are tried on one host"
        )
    elif not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "mpirun", "ip", "tc"))):
        install_packages(session, *DEBIAN)
    install_everything(session)
    session.install(MPI)
    run_pytest(session, "cluster")


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of what core brings along, from PyPI's database; not in CI."""
    session.install(TORCH)
    session.install("./packages/core")
    frozen = session.run("python", "-m", "pip", "freeze", "--all", silent=True) or ""
    session.install("pip-audit==2.10.1")
    # Without what marks a build of torch, which is on no index, and without what is not released.
    names = [line.partition("+")[0] for line in frozen.splitlines() if "==" in line]
    requirements = Path(session.create_tmp()) / "requirements.txt"
    requirements.write_text("\n".join(names))
    # Strict: what could not be looked up is an error.
    session.run("pip-audit", "--strict", "--disable-pip", "--no-deps", "-r", str(requirements))


@nox.session
def guide(session: nox.Session) -> None:
    """What docs/extend/write-a-strategy.md says, from an empty folder to a wheel on an index."""
    session.install(TORCH)
    session.install(*BUILD_TOOLS, *tools("pytest"))
    run_pytest(session, "guide", "tests/test_write_a_strategy.py")


@nox.session
def docs(session: nox.Session) -> None:
    """The site: its reference, links and prose are checked, and the code of each page runs.

    What follows `--` is pages of docs: only their code runs.
    """
    install_everything(session)
    session.install(*SITE)
    if not session.posargs:
        site = "docs/_build/html"
        # Nitpicky, with warnings as errors: each link and each cross-reference leads somewhere.
        options = ("-W", "--keep-going", "-j", "2", "-q", "-b", "html")
        session.run("sphinx-build", *options, "docs", site)
        session.run("python", "docs/tools/prose.py")
        session.run("python", "docs/tools/claims.py")
        session.run("python", "docs/tools/pictures.py", "--check")
    session.run("python", "docs/tools/blocks.py", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a classifier on real data in two processes; what follows `--` goes to the script."""
    run_script(session, "examples/digits.py", "scikit-learn")


@nox.session
def bench(session: nox.Session) -> None:
    """Step cost, import and start-up beside raw PyTorch and two peers; not in CI."""
    run_script(session, "benchmarks/run.py", "./packages/extras", *PEERS)


@nox.session
def endurance(session: nox.Session) -> None:
    """100 launches, 20 at once, and 20 kills of a rank; not in CI."""
    run_script(session, "benchmarks/endurance.py")


@nox.session
def matrix(session: nox.Session) -> None:
    """Every strategy of core by every launcher and environment that this machine has; not in CI."""
    run_script(session, "benchmarks/matrix.py")


@nox.session
def scale(session: nox.Session) -> None:
    """What up to 4,096 simulated ranks cost, and orders of up to 1e9 samples; not in CI."""
    run_script(session, "benchmarks/scale.py")


@nox.session
def durability(session: nox.Session) -> None:
    """200 kills of writers while they save, and bad disks; not in CI, where 20 are."""
    session.install(TORCH)
    names = ("core", "backend-torch", "extras", "testing")
    session.install(*(f"./packages/{name}" for name in names))
    directory = session.create_tmp()
    session.run(
        "stratagem", "checkpoint", "durability", directory, "--kills", "200", *session.posargs
    )


@nox.session
def resumes(session: nox.Session) -> None:
    """200 configurations drawn at random, resumed from each checkpoint; not in CI, where 8 are."""
    install_everything(session)
    seed = os.environ.get("STRATAGEM_RESUME_SEED", str(int(time.time())))
    session.log(f"STRATAGEM_RESUME_SEED={seed}")
    cases = {"STRATAGEM_RESUME_CASES": "200", "STRATAGEM_RESUME_SEED": seed}
    tests = ("-m", "not gpu", "-n", "2", "tests/test_drawn_runs.py")
    session.run("pytest", *tests, *session.posargs, env=cases)


@nox.session
def fuzz(session: nox.Session) -> None:
    """10,000 checkpoints made to harm, others each time, and all changed entries of two runs."""
    session.install(TORCH)
    session.install(
        "./packages/core",
        "./packages/backend-torch",
        "./packages/extras",
        *tools("hypothesis", "numpy", "pytest"),
    )
    files = [
        f"packages/core/tests/{name}.py"
        for name in ("checkpoint/test_fuzz_checkpoints", "trainer/test_hostile_progress")
    ]
    cases = {"STRATAGEM_FUZZ_CASES": "10000"}
    session.run("pytest", "-s", *files, *session.posargs, env=cases)
