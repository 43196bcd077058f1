"""The flag: where metrics are served."""

from typing import Final

from muster._shared.contract import LISTEN_ADDRESS, Env, parse_listen_address
from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag

_LOOPBACK: Final = "127.0.0.1"
FLAGS: Final = (
    Flag(
        name="metrics-port",
        metavar="[ADDR:]PORT",
        ours=True,
        has_variable=False,
        text="Serve /metrics (Prometheus' text and OpenMetrics), /healthz, /readyz and /status over HTTP. The address "
        "is 127.0.0.1 unless another IP address is given. 0 takes a free port, and status.json names it. If the port "
        "is taken, one line says so, and the job runs.",
    ),
)


def read(invocation: Invocation) -> tuple[str, int]:
    """Return an IP address and a port, 0 for a free one."""
    text = invocation.values.text("metrics-port") or ""
    found = parse_listen_address(text)
    if found is None:
        raise invocation.values.build_error("metrics-port", LISTEN_ADDRESS)
    return found[0] or invocation.environ.get(Env.METRICS_HOST) or _LOOPBACK, found[1]
