"""What a worker that initialises a process group sets for torch's flight recorder, where the user has not."""

import os
import sys
import types

import pytest

from muster.agent.workers.hooks import groups as group_hook

FOLDER = "/logs/job/attempt_0/3"
DUMPS = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{FOLDER}/collectives_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def list_set(monkeypatch: pytest.MonkeyPatch, version: str, **env: str) -> dict[str, str]:
    """What is set in the C library's environment alone."""
    found: dict[str, str] = {}
    for name in [name for name in os.environ if name.startswith(("TORCH_FR_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{FOLDER}/error.json")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr("posix.putenv", found.__setitem__)
        group_hook._set_defaults()
    assert dict(os.environ) == before
    return found


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "2.7.1+cu126",
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{FOLDER}/collectives_"},
        ),
        ("2.8.0", {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": f"{FOLDER}/collectives_"}),
        ("2.13.0+cpu", {"TORCH_FR_DUMP_TEMP_FILE": f"{FOLDER}/collectives_"}),
    ],
)
def test_each_torch_gets_the_names_that_it_does_not_warn_of(version, expected, monkeypatch) -> None:
    assert list_set(monkeypatch, version) == {**expected, **DUMPS}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the older names, too."""
    found = list_set(
        monkeypatch,
        "2.8.0",
        TORCH_NCCL_TRACE_BUFFER_SIZE="7",
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    assert found == {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{FOLDER}/collectives_"}


def test_without_a_log_folder_torchs_own_places_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_set(monkeypatch, "2.13.0", TORCHELASTIC_ERROR_FILE="") == {}
