"""What a program makes of `sys.path`, as a warm worker sees it at its end."""

import json
import os
import sys
from pathlib import Path

import pytest

from muster.agent.workers.warm.late_changes import LateChanges


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> LateChanges:
    monkeypatch.setattr(os, "putenv", os.putenv)  # restored after the test
    monkeypatch.setattr(sys, "path", sys.path[:])
    return LateChanges({"json": json}, reports=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "json.py").touch()
    return tmp_path


def test_a_folder_with_a_module_of_an_imported_name_is_said(changes, folder, capfd) -> None:
    sys.path.insert(0, str(folder))
    changes.check_path()
    assert f"folder of {folder}/json.py " in capfd.readouterr().err


@pytest.mark.parametrize(
    "convert", [Path, os.fsencode, lambda _: None, lambda _: 1], ids=["Path", "bytes", "None", "1"]
)
def test_what_imports_ignore_on_the_path_is_ignored(changes, folder, capfd, convert) -> None:
    sys.path.insert(0, convert(folder))
    changes.check_path()
    assert capfd.readouterr().err == ""
