"""Distributions that are missing or of another version: one line says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stratagem
from stratagem.errors import ConfigurationError
from stratagem_lightning_plugin import installed
from stratagem_lightning_plugin.installed import check_installation
from stratagem_torch.launch.run import run

CASES = [
    (
        {"stratagem-lightning": "0.2.0", "stratagem-extras": "0.2.0"},
        f"stratagem-lightning 0.2.0 does not work with stratagem-core {stratagem.__version__}: "
        "expected the same minor version: "
        "pip install --upgrade stratagem-lightning stratagem-core stratagem-extras",
    ),
    (
        {"stratagem-lightning": stratagem.__version__, "stratagem-extras": "0.0.9"},
        f"stratagem-lightning {stratagem.__version__} does not work with stratagem-extras 0.0.9: "
        "expected the same minor version: "
        "pip install --upgrade stratagem-lightning stratagem-core stratagem-extras",
    ),
]


@pytest.mark.parametrize(("versions", "said"), CASES)
def test_another_minor_version_is_refused(
    versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "version_of", versions.get)
    with pytest.raises(ConfigurationError) as caught:
        check_installation()
    assert str(caught.value) == said


def test_check_installation_accepts_this_installation() -> None:
    check_installation()


WITHOUT = "import sys; sys.modules['stratagem_extras'] = None; "
NEEDED = "stratagem-lightning needs stratagem-extras, which is not installed: pip install stratag"


def test_import_without_extras_names_the_package_to_install(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT} import stratagem_lightning"],
        env=script_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stderr.splitlines()[-1].startswith(f"stratagem.errors.ConfigurationError: {NEEDED}")


def test_run_as_lightning_without_extras_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setitem(sys.modules, "stratagem_extras", None)
    with pytest.raises(SystemExit) as caught:
        run(["--as-lightning", str(script)])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith(f"stratagem run: error: --as-lightning cannot be used. {NEEDED}")


CONVERT = """
import sys
import stratagem_lightning
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
try:
    convert_zero_checkpoint_to_fp32_state_dict("saved", "fp32.ckpt", "step=1")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("disabled", "said"),
    [
        ("", "CheckpointNotFoundError no checkpoint 'saved/step=1'"),
        ("stratagem-backend-deepspeed", "ImportError 'stratagem.checkpoint' has no 'convert_zero_"),
    ],
)
def test_zero_conversion_comes_from_the_deepspeed_backend(
    disabled: str, said: str, tmp_path: Path, script_environment: dict[str, str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CONVERT],
        env={**script_environment, "STRATAGEM_DISABLE_PLUGINS": disabled},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout.startswith(said), ran.stdout
    assert "stratagem-backend-deepspeed" in ran.stdout or not disabled
