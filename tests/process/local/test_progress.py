"""Progress without code on this machine: scripts that know nothing of muster have step and total in `muster status`."""

import pytest
from harness import wait_until
from progress_apps import build_app, copy_scripts, read_progress, wait_for_progress

from muster.schedulers.local import create_detached_scheduler

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_scripts_that_know_nothing_of_muster_have_step_and_total(tmp_path, monkeypatch, capsys, start):
    for package in ("transformers", "lightning", "tqdm"):
        pytest.importorskip(package)
    monkeypatch.chdir(copy_scripts(tmp_path))
    scheduler = create_detached_scheduler("torchx")
    app_id = scheduler.submit(build_app(start), {})
    handle = f"detached://torchx/{app_id}"
    try:
        wait_for_progress(handle, capsys)
        (tmp_path / "end").touch()
        wait_until(lambda: scheduler.describe(app_id).state.name == "SUCCEEDED", timeout_s=60, what="the end")
        assert read_progress(handle, capsys)["hf_trainer"] == (40, 40, None)
    finally:
        scheduler.delete(app_id)
        scheduler.close()
