"""Runs the executables that a site has added, all at once. `_shared.preflight` reads what they print."""

import os
from collections.abc import Callable
from typing import Final

from muster._shared.contract import Env
from muster._shared.preflight import SITE_LIMITS_S, Finding, read_site_check
from muster.agent.config import AgentConfig
from muster.agent.features.limited_command import LimitedCommand
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch

_MOST_LINES: Final = 1000


class SiteCheck:
    """One running executable."""

    def __init__(
        self, path: str, loop: Loop, children: ChildWatch, config: AgentConfig, mode: str, on_over: Callable[[], None]
    ) -> None:
        self._name = os.path.basename(path)
        self._lines: list[str] = []
        self._trouble = ""
        env = {**config.base_env, Env.PREFLIGHT: mode, "LOCAL_WORLD_SIZE": str(config.nproc)}
        self.command = LimitedCommand(
            loop,
            children,
            (path,),
            prepare=lambda: env,
            text="",
            limit_s=SITE_LIMITS_S[mode],
            label=path,
            on_line=self._read_line,
            on_trouble=self._read_trouble,
            on_over=on_over,
        )

    def _read_line(self, line: str) -> None:
        if len(self._lines) < _MOST_LINES:
            self._lines.append(line)

    def _read_trouble(self, line: str) -> None:
        self._trouble = line

    def list_findings(self) -> tuple[Finding, ...]:
        """Return what the executable has found, once it is over."""
        return read_site_check(self._name, self._lines, self._trouble, is_killed=self.command.is_killed)


class SiteChecks:
    """All executables of a folder."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        config: AgentConfig,
        mode: str,
        paths: tuple[str, ...],
        on_found: Callable[[tuple[Finding, ...]], None],
    ) -> None:
        """Start them. Call back once, on the loop, when the last has ended.

        Args:
            loop: the agent's.
            children: collects them.
            config: the agent's.
            mode: --preflight.
            paths: at least one.
            on_found: gets all that they have found.
        """
        self._on_found = on_found
        self._running = len(paths)
        self._checks = [SiteCheck(path, loop, children, config, mode, self._on_over) for path in paths]

    def _on_over(self) -> None:
        self._running -= 1
        if not self._running:
            self._on_found(tuple(finding for check in self._checks for finding in check.list_findings()))

    def close(self) -> None:
        """Kill those that still run. No callback follows."""
        self._on_found = lambda _findings: None
        for check in self._checks:
            check.command.kill()
