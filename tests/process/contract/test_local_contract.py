"""What every adapter must do, of local_cwd and of the example: apps that outlive their command are `detached`."""

import os
import subprocess
import sys

import pytest
from contract_hooks import OnThisMachine
from doc_pages import ROOT

from muster._shared.control import CommandExit

COUNT = """
import time
from muster import worker

step = 0
while not worker.should_stop(step):
    worker.step(step)
    time.sleep(0.02)
    step += 1
print("stopped at a step")
"""


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

    def test_a_command_needs_nothing_of_it_but_its_entry_point(self, tmp_path, monkeypatch):
        """Status, log, exec, stop, holds and deletion, as of a scheduler of muster's."""
        metadata = tmp_path / "site" / "folders-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: folders\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[torchx.schedulers]\nfolders = folders:create_scheduler\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ["PYTHONPATH"], str(metadata.parent), str(ROOT))))
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "count.py").write_text(COUNT)
        (tmp_path / "code" / "hello.py").write_text("print('hello')\n")

        def call(*words):
            command = [sys.executable, "-m", "muster", *words]
            done = subprocess.run(
                command, cwd=tmp_path / "code", capture_output=True, text=True, timeout=self.limit_s, check=False
            )
            return done.returncode, done.stdout + done.stderr

        job = ("dist.ddp", "-j", "1x1", "--start", "cold", "--script", "count.py")
        code, told = call("run", "-s", "folders", *job)
        assert (code, told.startswith("folders://torchx/count-")) == (0, True), told
        self.wait(lambda: call("checkpoint", "count")[0] != CommandExit.LOST, "its ranks to answer")
        assert "RUNNING" in call("status", "count")[1]
        assert call("exec", "count", "--", "printenv", "MUSTER_ADAPTER") == (0, "folders\n")
        assert call("stop", "count")[0] == CommandExit.DONE
        assert "stopped at a step" in call("log", "count", "--rank", "0")[1]
        code, told = call("hold", "-s", "folders", "dist.ddp", "-j", "1x1", "--preload", "none")
        assert code == 0, told
        code, told = call("run", "-s", "held", "dist.ddp", "-j", "1x1", "--script", "hello.py")
        assert (code, "hello0]:hello" in told) == (0, True), told
        assert call("release")[0] == CommandExit.DONE
        assert call("delete", "count")[0] == CommandExit.DONE
        assert "count-" not in call("list")[1]
