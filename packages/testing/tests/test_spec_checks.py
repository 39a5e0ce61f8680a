"""What a spec says is compared with what it names, without a run."""

from __future__ import annotations

from stratagem.discovery import PrecisionSpec, get_registry
from stratagem_testing.author.spec_checks import check_spec


def test_missing_incompatible_because_is_found_without_a_run() -> None:
    spec = PrecisionSpec(
        name="fp9",
        target="stratagem.one_device.precision:TruePrecision",
        api_version=1,
        incompatible_because="stratagem.one_device.plugin:nobody",
    )
    assert list(check_spec(spec, get_registry())) == [
        "its incompatible_because's module stratagem.one_device.plugin defines no 'nobody'"
    ]
