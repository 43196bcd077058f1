"""The flags of features: what the configuration has of them, and what is refused."""

import sys
from typing import Any

import pytest

from muster._shared.contract import Env
from muster.agent.cli.arguments import parse_args
from muster.agent.errors import UsageError
from muster.agent.features import FLAG_OWNERS, load_module
from muster.agent.features.preflight.flags import PreflightSettings
from muster.agent.features.snapshots.flags import SnapshotSettings


def parse(words: str, **environ: str) -> dict[str, Any]:
    return dict(parse_args([*words.split(), "train.py"], environ).features)


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ("", {}),
        ("--notify=/bin/sh", {"notify": ("/bin/sh",)}),
        ("--metrics-port 9464", {"export": ("127.0.0.1", 9464)}),
        ("--metrics-port 0.0.0.0:0", {"export": ("0.0.0.0", 0)}),
        ("--metrics_port [::]:1", {"export": ("::", 1)}),
        ("--snapshot-memory 25%", {"snapshots": SnapshotSettings(share=250)}),
        ("--snapshot-mem 64G", {"snapshots": SnapshotSettings(share=0, limit_bytes=64 << 30)}),
        ("--snapshot-memory 0", {"snapshots": SnapshotSettings(share=0, limit_bytes=0)}),
        ("--snapshot-copies 0", {"snapshots": SnapshotSettings(copies=0)}),
        ("--preflight off --devices 8", {"preflight": PreflightSettings(mode="off", devices=8)}),
    ],
)
def test_what_flags_say(words: str, features: dict[str, Any]) -> None:
    assert parse(words) == features


def test_an_adapter_names_the_address_of_metrics() -> None:
    assert parse("--metrics-port 9464", **{Env.METRICS_HOST: "0.0.0.0"}) == {"export": ("0.0.0.0", 9464)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--metrics-port ٢", "--metrics-port '٢': must be"),
        ("--metrics-port host:1", "--metrics-port 'host:1': must be [ADDRESS:]PORT with an IP address and a port from"),
        ("--metrics-port 65536", "--metrics-port '65536': must be [ADDRESS:]PORT"),
        ("--metrics-port ::1", "--metrics-port '::1': must be [ADDRESS:]PORT"),
        ("--snapshot-memory ٢", "--snapshot-memory '٢': must be"),
        (
            "--snapshot-memory 101%",
            "--snapshot-memory '101%': must be a share of the free memory from 1% to 100%, b",
        ),
        ("--snapshot-memory 0%", "--snapshot-memory '0%': must be"),
        ("--snapshot-memory 64Gi", "--snapshot-memory '64Gi': must be"),
        ("--snapshot-memory 9999999999T", "--snapshot-memory '9999999999T': must be"),
        ("--snapshot-copies 2", "--snapshot-copies '2': must be a whole number, at least 0 and at most 1"),
        ("--preflight fast", "--preflight 'fast': must be one of quick, full, off"),
        ("--preflight full --no-python", "--preflight full measures in Python workers; "),
        ("--devices -1", "--devices '-1': must be a number of GPUs"),
        ("--notify=", "--notify '': must be a command"),
        ("--notify 'sh", """--notify "'sh": must be words as in a shell, but there is no closing quotation"""),
        ("--notify /no/such", "--notify '/no/such': there is no program '/no/such' on this node"),
        ("--snapshot 1", "--snapshot is ambiguous: --snapshot-memory, --snapshot-copies"),
        ("--notifi x", "unknown flag --notifi (did you mean --notify?)"),
    ],
)
def test_what_is_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert message in str(caught.value)


def test_a_folder_has_the_flags_that_its_row_names() -> None:
    for name in set(FLAG_OWNERS.values()):
        flags = {flag.name for flag in load_module(name, "flags").FLAGS}
        assert flags == {flag for flag, owner in FLAG_OWNERS.items() if owner == name}


def test_flags_of_the_agent_itself_load_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAG_OWNERS.values():
        monkeypatch.delitem(sys.modules, f"muster.agent.features.{name}.flags", raising=False)
    parse("--nproc-per-node 2 --max_restarts 3")
    assert [name for name in FLAG_OWNERS.values() if f"muster.agent.features.{name}.flags" in sys.modules] == []
