"""Rules of `--on`, seen in pods of the double."""

import pytest
from doubles.kubernetes_kubelet import run_kubelet
from harness import wait_until
from policy_jobs import build_policy_app, check_policies, each_end
from torchx.runner import Runner
from torchx.specs import is_terminal

from muster.schedulers.kubernetes import create_scheduler

pytestmark = [pytest.mark.torchx, pytest.mark.long]


@each_end
def test_what_follows_is_what_the_rules_say(cluster, tmp_path, what, end) -> None:
    with (
        run_kubelet(cluster, tmp_path / "pods"),
        Runner("test", {"kubernetes": create_scheduler}) as runner,
    ):
        app = build_policy_app(what, tmp_path / "code", image="img")
        handle = runner.run(app, "kubernetes", cfg={"namespace": "team"}, workspace=str(tmp_path / "code"))
        wait_until(lambda: is_terminal(runner.status(handle).state), what="its end", timeout_s=240)
        status = runner.status(handle)
    log = "".join(line.partition(b" ")[2].decode() for lines in cluster.logs.values() for _, line in lines)
    check_policies(what, end, log)
    assert ("kubectl cordon node-a keeps new pods off it" in log) == (what == "all"), log
    assert status.state.name == "FAILED"
    assert end in status.msg
