"""The part: looks at this machine while the agent starts, and holds the workers back for a moment until it knows."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import Env
from muster._shared.processes import find_nvml
from muster._shared.records import record, replace
from muster.agent.node.round_parts import PartContext, RoundPart, Start
from muster.agent.runtime.loop import Awaited, Loop

if TYPE_CHECKING:
    from muster._shared.preflight import Finding
    from muster._shared.reports import FailedCheck
    from muster.agent.config import AgentConfig
    from muster.agent.features.preflight.messages import NodeFacts
    from muster.agent.features.preflight.site import SiteChecks
    from muster.agent.round import Round

WAITS_S = {"quick": 0.3, "full": 60.0}
"""How long workers wait for the checks of this machine, by --preflight. A later finding ends the attempt."""
_REACH_MARGIN_S = 2.0
"""How much longer MASTER_ADDR is dialled than the silence after which a node is lost, so that a loss is known first."""


@record
class MachineCheck:
    """What this machine is like."""

    findings: "tuple[Finding, ...]" = ()
    facts: "NodeFacts | None" = None
    """What the other nodes compare; None in a job of one node."""
    site_checks: tuple[str, ...] = ()
    """The executables that the site has added."""


def begin_early(loop: Loop, config: "AgentConfig", environ: Mapping[str, str]) -> Awaited[MachineCheck]:
    """Begin to look at this machine, while the agent starts."""
    workspace = environ.get(Env.WORKSPACE) or ""
    return Awaited(loop, lambda: _look(config, workspace), without=lambda _error: _look(config, workspace))


def _look(config: "AgentConfig", workspace: str) -> MachineCheck:
    """Check this machine, in a thread. What cannot be read is no finding."""
    try:
        from muster._shared import preflight

        environ, rendezvous, settings = config.base_env, config.rendezvous, config.features.get("preflight")
        visible = preflight.parse_visible(environ.get("CUDA_VISIBLE_DEVICES"))
        need = preflight.Need(
            nproc=config.nproc, devices=None if settings is None else settings.devices, visible=visible
        )
        nvml = None if visible == () else find_nvml(environ)
        machine = preflight.read_machine(_list_folders(config), nvml=nvml)
        findings = preflight.find_problems(machine, need)
        if config.stops_together and rendezvous.node_index not in (None, 0):
            shared = {row.name for row in preflight.TABLE if row.is_shared}  # reported by node 0
            findings = tuple(each for each in findings if each.check not in shared)
        site_folder = environ.get(Env.PREFLIGHT_DIR)
        site_checks = preflight.find_site_checks(site_folder)
        findings += preflight.find_unused_folder(site_folder, site_checks)
        facts = None
        if rendezvous.max_nodes > 1:
            from muster.agent.features.preflight.node_facts import read_facts

            facts = read_facts(config, workspace, machine)
    except (OSError, ImportError):  # no descriptors left: reported elsewhere
        return MachineCheck()
    return MachineCheck(findings=findings, facts=facts, site_checks=site_checks)


def _list_folders(config: "AgentConfig") -> dict[str, str]:
    """Return the folders into which the job writes."""
    base_dir = config.logs.base_dir
    if base_dir == os.devnull:
        return {}
    if base_dir is not None:
        return {"the log folder": base_dir}
    return {"the temporary folder": config.base_env.get("TMPDIR") or "/tmp"}  # noqa: S108  # as tempfile does


def _name_check(name: str) -> "FailedCheck":
    """Name the check of an error. Most nodes have none, and load nothing for it."""
    from muster._shared.causes import DEVICE, NETWORK
    from muster._shared.reports import FailedCheck

    causes = {"driver": DEVICE, "devices": DEVICE, "reach": NETWORK}
    advice = "--preflight off starts the job anyway"
    return FailedCheck(feature="preflight", name=name, advice=advice, cause=causes.get(name, ""))


class PreflightPart(RoundPart):
    """The checks of one node. The first error ends the attempt, and keeps workers of later ones from starting."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        settings = context.config.features.get("preflight")
        self._mode = "quick" if settings is None else str(settings.mode)
        self._is_looking = True
        self._error: Finding | None = None
        self._facts: NodeFacts | None = None
        self._has_told = False
        """Whether the leader of the job has the facts."""
        self._round: Round | None = None
        self._start: Start | None = None
        """The start that is held back."""
        self._site: SiteChecks | None = None
        if isinstance(context.early, Awaited):
            context.early.watch(self._on_checked)

    # -- what is found ----------------------------------------------------------------------------------------------

    def _on_checked(self, check: MachineCheck) -> None:
        """Handle the end of the look. The checks of the site come last, because their duration is unknown."""
        self._facts = check.facts
        self._tell_facts()
        self._note(check.findings, is_last=not check.site_checks)
        if check.site_checks:
            from muster.agent.features.preflight.site import SiteChecks

            context = self._context
            self._site = SiteChecks(
                context.loop,
                context.children,
                context.config,
                self._mode,
                check.site_checks,
                lambda found: self._note(found, is_last=True),
            )

    def _note(self, findings: "tuple[Finding, ...]", *, is_last: bool) -> None:
        """Record and print findings. The first error is printed as the failure that it is."""
        config = self._context.config
        index = config.rendezvous.node_index
        where = config.node_name if index is None else f"node {index} ({config.node_name})"
        for finding in findings:
            text = finding.describe()
            self._context.event_log.write(
                "preflight_finding", check=finding.check, level=finding.level.value, text=text
            )
            if self._error is None and finding.level.value == "error":
                self._error = finding
            else:
                self._context.logs.print_line(f"preflight: {where}: {text}")
        if self._error is not None and self._start is None and self._round is not None:
            self._context.fail(self._round.number, self._error.describe(), _name_check(self._error.check))
        if is_last or self._error is not None:
            self._end_wait()

    def _end_wait(self) -> None:
        """Have the workers start, or fail."""
        self._is_looking = False
        start, self._start = self._start, None
        if start is not None and self._error is not None:
            start.fail(self._error.describe(), _name_check(self._error.check))
        elif start is not None:
            start.release()

    # -- rounds -----------------------------------------------------------------------------------------------------

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`. A new attempt of nodes that the leader knows is compared with none."""
        if start is None:
            return
        last, self._round = self._round, formed
        is_known = last is not None and formed.attempt > last.attempt and self._has_told
        if formed.group_world_size > 1 and not is_known:
            self._has_told = False
            self._tell_facts()
            if formed.group_rank > 0 and self._context.config.rendezvous.backend == "muster":
                self._reach_master(formed)
        if self._error is not None:
            start.fail(self._error.describe(), _name_check(self._error.check))
        elif self._is_looking:
            start.hold()
            self._start = start
            self._context.loop.call_later(WAITS_S[self._mode], lambda: self._stop_waiting(start))

    def _stop_waiting(self, start: Start) -> None:
        if self._start is start:
            self._end_wait()

    def _tell_facts(self) -> None:
        formed = self._round
        if self._facts is None or formed is None or self._has_told or formed.group_world_size == 1:
            return
        from muster._shared.codec import encode_message
        from muster.agent.features.preflight.messages import LIMIT_BYTES

        self._has_told = True
        facts = replace(self._facts, clock_s=self._context.loop.clock.wall_s())
        self._context.send(formed.number, encode_message(facts, LIMIT_BYTES))

    def _reach_master(self, formed: "Round") -> None:
        from muster._shared.preflight import REACH
        from muster.agent.features.preflight.reachability import find_obstacle

        limit_s = self._context.config.rendezvous.silence_s + _REACH_MARGIN_S

        def tell(obstacle: str | None) -> None:
            if obstacle is None:
                return
            where = f"MASTER_ADDR {formed.master_addr} (port {formed.master_port}) cannot be reached from here"
            reason = f"{where}: {obstacle}; expected a connection: {REACH.advice}"
            self._context.fail(formed.number, reason, _name_check(REACH.name))

        self._context.loop.call_in_thread(
            lambda: find_obstacle(formed.master_addr, formed.master_port, limit_s), tell, without=lambda _error: None
        )

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """See `RoundPart`."""
        del local_rank
        return {Env.RUN_FIRST: "features/preflight/measure"} if self._mode == "full" and formed.attempt == 0 else {}

    def close(self) -> None:
        """See `RoundPart`."""
        if self._site is not None:
            self._site.close()


def create_part(context: PartContext) -> PreflightPart:
    """Create the part of one agent."""
    return PreflightPart(context)
