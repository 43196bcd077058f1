"""Rules of `--on`, seen in containers."""

import pytest
from policy_jobs import build_policy_app, check_policies, each_end

pytestmark = [pytest.mark.docker, pytest.mark.long]


@each_end
def test_what_follows_is_what_the_rules_say(apps, tmp_path, what, end):
    app = build_policy_app(what, tmp_path / "code", image="muster-test:torch")
    app_id = apps.run(app, workspace=str(tmp_path / "code"))
    status = apps.wait(app_id, deadline_s=180)
    log = "".join(line for node in range(2) for line in apps.logs(app_id, role="policies", replica=node))
    check_policies(what, end, log)
    assert status.state.name == "FAILED"
    assert end in status.msg
