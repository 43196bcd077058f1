"""Progress without code in containers: scripts that know nothing of muster have step and total in `muster status`."""

import sysconfig

import pytest
from progress_apps import EXPECTED, build_app, copy_scripts, wait_for_progress

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_scripts_that_know_nothing_of_muster_have_step_and_total(apps, tmp_path, capsys, start):
    """The image has torch; the packages of this environment, which fit its Python, are mounted beside it."""
    for package in ("transformers", "lightning", "tqdm"):
        pytest.importorskip(package)
    packages = sysconfig.get_paths()["purelib"]
    app = build_app(
        start,
        image="muster-test:torch",
        mounts=["type=bind", f"src={packages}", "dst=/packages", "readonly"],
        env={"PYTHONPATH": "/packages"},
    )
    app_id = apps.run(app, workspace=str(copy_scripts(tmp_path)))
    handle = f"docker://test/{app_id}"
    wait_for_progress(handle, capsys)
    for role in EXPECTED:
        apps.inside(app_id, "touch end && echo end", role=role)
    assert apps.wait(app_id).state.name == "SUCCEEDED"
    for role in ("hf_trainer", "lightning_fit"):
        assert "[muster] 40 of 40 steps; " in "".join(apps.logs(app_id, role=role)), apps.logs(app_id, role=role)
