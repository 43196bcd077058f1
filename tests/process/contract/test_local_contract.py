"""What every adapter must do, of local_cwd and of the example: apps that outlive their command are `detached`."""

import os

import pytest
from contract_hooks import OnThisMachine
from doc_pages import ROOT


@pytest.mark.torchx
class TestDetached(OnThisMachine):
    """Replicas are processes of this machine, in the current directory."""

    name = "detached"
    factory = "muster.schedulers.local:create_detached_scheduler"


@pytest.mark.long
class TestFolders(OnThisMachine):
    """The example of the page *Write an adapter*."""

    name = "folders"
    factory = "folders:create_scheduler"

    @pytest.fixture(autouse=True)
    def _on_path(self, monkeypatch):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    def test_each_replica_has_a_copy_of_the_workspace(self, scheduler, tmp_path):
        from muster.testing.contract_apps import build_shell

        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "data").write_text("from here\n")
        app = build_shell("cat data; echo changed >data; pwd", replicas=2)
        scheduler.build_workspace_and_update_role(app.roles[0], f"file://{tmp_path}/code", {})
        app_id = self.submit(scheduler, app)
        self.wait(lambda: scheduler.describe(app_id).state.name == "SUCCEEDED", "the end")
        logs = [self.read(scheduler, app_id, index).splitlines() for index in range(2)]
        assert [lines[0] for lines in logs] == ["from here", "from here"]
        assert logs[0][1] != logs[1][1]
        assert (tmp_path / "code" / "data").read_text() == "from here\n"
