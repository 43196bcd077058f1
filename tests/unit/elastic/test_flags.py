"""torch's configuration objects become the agent's command line."""

from typing import Any

import pytest

from muster.agent.cli.arguments import parse_args
from muster.agent.config import AgentConfig, Std
from muster.agent.errors import UsageError

pytestmark = pytest.mark.torch


def configure(**fields: Any) -> AgentConfig:
    from muster.elastic import LaunchConfig
    from muster.elastic.flags import build_flags

    settings = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "run_id": "job", **fields}
    return parse_args([*build_flags(LaunchConfig(**settings)), "main.py"], {})


def test_the_defaults() -> None:
    config = configure()
    assert (config.nproc, config.max_restarts, config.role, config.rendezvous.run_id) == (2, 3, "default_role", "job")
    assert (config.rendezvous.standalone, config.shutdown_timeout_s, config.logs.base_dir) == (True, 30.0, None)


def test_every_field_has_an_effect() -> None:
    from muster.elastic import DefaultLogsSpecs
    from muster.elastic import Std as TorchStd

    config = configure(
        role="trainer",
        max_restarts=1,
        local_addr="10.0.0.1",
        signals_to_handle="SIGTERM,SIGUSR1",
        duplicate_stdout_filters=["a,b"],
        virtual_local_rank=True,
        shutdown_timeout=7,
        rdzv_timeout=70,
        logs_specs=DefaultLogsSpecs("/dev/null", {1: TorchStd.ALL}, TorchStd.OUT, {0}),
    )
    assert (config.role, config.max_restarts, config.rendezvous.local_addr) == ("trainer", 1, "10.0.0.1")
    assert config.signals_to_handle == ("SIGTERM", "SIGUSR1")
    assert (config.virtual_local_rank, config.shutdown_timeout_s) == (True, 7.0)
    assert config.rendezvous.join_timeout_s == 70.0
    logs = config.logs
    assert (logs.base_dir, logs.redirects.of(1), logs.redirects.of(0)) == ("/dev/null", Std.ALL, Std.NONE)
    assert (logs.tee.of(0), logs.local_ranks_filter, logs.duplicate_stdout_filters) == (Std.OUT, {0}, ("a,b",))


def test_events_go_to_torchs_handlers_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.events import handlers

    assert configure(event_log_handler="console").event_log_handler == "null"
    with pytest.raises(UsageError, match=r"--event-log-handler 'mine': .* null, console"):
        configure(event_log_handler="mine")
    monkeypatch.setitem(handlers._log_handlers, "mine", handlers.get_logging_handler("console"))
    assert configure(event_log_handler="mine").event_log_handler == "null"


def test_rendezvous() -> None:
    own = configure(max_nodes=2, rdzv_backend="c10d", rdzv_endpoint="host:1").rendezvous
    assert (own.backend, own.host, own.port, own.min_nodes, own.max_nodes) == ("muster", "host", 1, 1, 2)
    fixed = {"rdzv_backend": "static", "rdzv_endpoint": "127.0.0.1:29501", "rdzv_configs": {"rank": 0}}
    static = configure(**fixed).rendezvous
    assert (static.backend, static.master_port, static.node_index, static.join_timeout_s) == ("static", 29501, 0, 900.0)
    assert configure(
        rdzv_backend="etcd", rdzv_endpoint="h:2379", rdzv_configs={"protocol": "http"}
    ).rendezvous.conf == {
        "protocol": "http",
        "timeout": "900",
    }
    assert configure(rdzv_backend="c10d", rdzv_endpoint="localhost:0").rendezvous.standalone


def test_fields_of_older_torch() -> None:
    from muster.elastic import DefaultLogsSpecs
    from muster.elastic import Std as TorchStd

    logs = configure(log_dir="/tmp", redirects=TorchStd.OUT, tee={0: TorchStd.ERR}).logs
    assert (logs.base_dir, logs.redirects.of(5), logs.tee.of(0), logs.tee.of(1)) == ("/tmp", Std.OUT, Std.ERR, Std.NONE)
    with pytest.raises(ValueError, match="log_dir and logs_specs"):
        configure(log_dir="/tmp", logs_specs=DefaultLogsSpecs())


def test_a_layout_of_its_own_is_refused() -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

    class Layout(DefaultLogsSpecs):  # type: ignore[misc]
        def reify(self, envs: Any) -> Any:
            return None

    with pytest.raises(UsageError, match=r"Layout as a torchrun\.logs_specs"):
        configure(logs_specs=Layout("/dev/null"))


def test_the_fields_are_torchs_in_torchs_order() -> None:
    from dataclasses import fields

    from torch.distributed.elastic.agent.server.api import WorkerSpec as TorchSpec
    from torch.distributed.launcher.api import LaunchConfig as TorchConfig

    from muster.elastic import LaunchConfig, WorkerSpec

    for ours, theirs in ((LaunchConfig, TorchConfig), (WorkerSpec, TorchSpec)):
        names = [field.name for field in fields(theirs)]
        assert [field.name for field in fields(ours)][: len(names)] == names
        assert issubclass(ours, theirs)
    own = {field.name: field.default for field in fields(LaunchConfig)}
    for field in fields(TorchConfig):
        assert own[field.name] == field.default or field.name == "rdzv_backend"
    config = LaunchConfig(1, 1, 1)
    config.numa_options = None  # accelerate does
    assert config.rdzv_backend == "muster"


def test_a_negative_shutdown_timeout_is_torchs_error() -> None:
    from muster.elastic import LaunchConfig

    with pytest.raises(ValueError, match=r"shutdown_timeout .* -1"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)


def test_a_handler_of_the_caller_needs_a_caller() -> None:
    from muster.agent.rendezvous.selection import create_rendezvous
    from muster.agent.runtime.loop import Loop

    config = parse_args(["--rdzv-backend", "caller", "main.py"], {}).rendezvous
    loop = Loop()
    try:
        with pytest.raises(UsageError, match="--rdzv-backend caller: "):
            create_rendezvous(config, 1, "role", loop, None, "node", lambda _event: None)
    finally:
        loop.close()
