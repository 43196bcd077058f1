"""A MASTER_ADDR that one node cannot reach: the job ends with a line that says so, not after torch's half an hour."""

from pathlib import Path

import pytest
from harness import check_all
from netns_world import World

from muster.cli.rehearse.world import run_tool

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]


@pytest.mark.parametrize("obstacle", ["Network is unreachable", pytest.param("no answer", marks=pytest.mark.long)])
def test_an_interface_that_the_other_node_cannot_reach(obstacle: str, tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time; time.sleep(600)\n")
    with World(tmp_path) as world:
        world.net.add_node()
        space, address = world.net.spaces[0], "10.77.0.99"
        if obstacle == "no answer":
            run_tool("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run_tool("ip", "netns", "exec", space, "iptables", "-A", "INPUT", "-d", address, "-i", "eth0", "-j", "DROP")
        else:
            address = "10.99.0.1"
            run_tool("ip", "-n", space, "link", "add", "other0", "type", "veth", "peer", "name", "other1")
            run_tool("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "other0")
        flags = {"sums": "plain", "program": (str(program),)}
        nodes = [world.launch(0, "2:2", **flags, **{"local-addr": address}), world.launch(1, "2:2", **flags)]
        outcomes = check_all([node.tree for node in nodes], 1)
        explained = "\n".join(node.explain() for node in nodes)
        text = " ".join(outcomes[0].stderr.split())
        assert "preflight of node 1 (" in text, explained
        assert f"MASTER_ADDR {address} (port " in text, explained
        assert f"reached from here: {obstacle}; " in text, explained
        assert "with --local-addr" in text, explained


def test_a_link_that_is_back_in_time_is_no_finding(tmp_path: Path) -> None:
    """Only the other address is silent for a second, or longer on a busy machine: the job goes on."""
    program = tmp_path / "waits.py"
    program.write_text("import time; time.sleep(10)\n")
    with World(tmp_path) as world:
        world.net.add_node()
        space, address = world.net.spaces[0], "10.77.0.99"
        run_tool("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        rule = ["INPUT", "-d", address, "-i", "eth0", "-j", "DROP"]
        run_tool("ip", "netns", "exec", space, "iptables", "-A", *rule)
        flags = {"sums": "plain", "program": (str(program),)}
        nodes = [world.launch(0, "2:2", **flags, **{"local-addr": address}), world.launch(1, "2:2", **flags)]
        world.wait_for(lambda: all('"workers_started"' in node.read_events() for node in nodes), "both nodes run")
        run_tool("ip", "netns", "exec", space, "iptables", "-D", *rule)
        check_all([node.tree for node in nodes])
