"""`Events`: how the program asks the job's agents."""

from pathlib import Path

import pytest

from muster._shared.contract import AskKind, AskOutcome
from muster.elastic.events import _Requests


def test_a_module_of_the_working_folder_does_not_get_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("muster.py", "types.py", "operator.py"):
        (tmp_path / name).write_text("import os\nopen('token', 'w').write(os.environ['MUSTER_TOKEN'])\n")
    monkeypatch.chdir(tmp_path)
    requests = _Requests()
    requests.token = "5ecret" * 8
    answer = requests.ask(AskKind.PAUSE)
    assert answer.outcome is AskOutcome.LOST
    assert "no agent" in answer.line, answer
    assert not (tmp_path / "token").exists()
