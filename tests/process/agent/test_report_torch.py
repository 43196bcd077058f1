"""Error files travel between torch and us in both directions."""

import json
from pathlib import Path

import pytest
from doubles.samples import make_failure

from muster._shared.reports import Report
from muster.agent.diagnosis.report_files import write_torch_error_file

pytestmark = pytest.mark.torch


def test_what_we_write_is_read_by_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch in this environment")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    failure = make_failure(
        pid=7,
        time_s=1_700_000_000.75,
        signal="SIGSEGV",
        exception="Fatal Python error: Segmentation fault",
        traceback="Fatal Python error: Segmentation fault\n  File m.py, line 1",
    )
    write_torch_error_file(Report(run_id="r", reason="x", attempt=0, max_restarts=0, failures=(failure,)), str(path))
    read = ProcessFailure(local_rank=0, pid=7, exitcode=-11, error_file=str(path))
    assert read.timestamp == 1_700_000_000
    assert "File m.py, line 1" in str(ChildFailedError("job", {0: read}))
    assert json.loads(path.read_text())["message"]["errorCode"] == -11
