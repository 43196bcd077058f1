"""Rules of `--on`, seen on local_cwd."""

import pytest
from harness import wait_until
from policy_jobs import build_policy_app, check_policies, each_end
from torchx.runner import Runner
from torchx.specs import is_terminal

from muster.schedulers.local import create_scheduler

pytestmark = [pytest.mark.torchx, pytest.mark.long]


@each_end
def test_what_follows_is_what_the_rules_say(tmp_path, monkeypatch, what, end) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with Runner("test", {"local_cwd": create_scheduler}) as runner:
        app = build_policy_app(what, tmp_path / "code")
        monkeypatch.chdir(tmp_path / "code")
        handle = runner.run(app, "local_cwd", cfg={})
        wait_until(lambda: is_terminal(runner.status(handle).state), what="its end", timeout_s=240)
        status = runner.status(handle)
        log = "\n".join(line for node in range(2) for line in runner.log_lines(handle, "policies", node))
    check_policies(what, end, log)
    assert status.state.name == "FAILED"
    assert end in status.msg
