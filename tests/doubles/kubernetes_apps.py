"""What the tests of Kubernetes submit, and the rights that the pages name."""

from torchx import specs

RIGHTS = {
    "jobs.batch": {"create", "get", "list", "patch", "delete"},
    "pods": {"list", "watch"},
    "pods/log": {"get"},
    "events": {"list"},
    "secrets": {"create", "patch", "delete"},
    "configmaps": {"create", "patch", "delete"},
    "services": {"create", "patch", "delete"},
}
"""All but those of commands that ask a running job: these need `pods/exec`, too."""


def build_agent_role(
    name: str = "trainer", *, nodes: int = 2, least: int | None = None, max_retries: int = 0
) -> specs.Role:
    """A role of our agent: a pod for each of its nodes, at least `least` of them."""
    return specs.Role(
        name=name,
        image="img",
        entrypoint="python3",
        args=["-m", "muster.agent", "--nnodes", str(nodes), "--node-rank", specs.macros.replica_id, "main.py"],
        num_replicas=nodes,
        min_replicas=least,
        max_retries=max_retries,
        resource=specs.Resource(cpu=1, gpu=0, memMB=128),
    )
