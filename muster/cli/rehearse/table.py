"""Writes what a rehearsal has found, and what to change: a table, JSON, and JUnit XML."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final
from xml.etree import ElementTree as ET

from muster._shared.contract import show_controls
from muster.cli.rehearse.outcome import Row, Verdict


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change."""

    text: str
    page: str
    """`docs/NAME.md#HEADING`."""


ADVICE: Final[Mapping[str, Advice]] = {
    "resume": Advice(
        text="the script starts with its first step again: load the last checkpoint at the start "
        "(worker.resume_path() names it), and continue with the step after it",
        page="docs/preemption.md#how-to-resume",
    ),
    "saved": Advice(
        text="a checkpoint counts only if all ranks report it, and only some do: let every rank save its own part, "
        "and call worker.saved at the same step",
        page="docs/preemption.md#how-to-resume",
    ),
    "atomic": Advice(
        text="what was saved cannot be read after the fault: write a checkpoint beside the last one, then rename it "
        "(os.replace), so that a kill at any moment leaves a complete one",
        page="docs/rehearse.md#a-checkpoint-that-is-not-atomic",
    ),
    "stop": Advice(
        text="the ranks could not stop at one step: every rank must call worker.should_stop at the same "
        "steps, and only some do",
        page="docs/preemption.md#the-loop",
    ),
    "data": Advice(
        text="after the restart the script computes something else: save and load what decides its data (the sampler's "
        "or loader's position, the random states), or derive it from the step",
        page="docs/preemption.md#what-the-checkpoint-must-withstand",
    ),
    "hang": Advice(
        text="the job stood still until the rehearsal ended it: set --hang_timeout, so that its ranks start again",
        page="docs/hangs.md#options",
    ),
    "failed": Advice(
        text="the job did not survive: its report names the rank and the line; if all retries were used, raise "
        "--max_retries",
        page="docs/verdicts.md#classes",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a whole rehearsal."""

    command: str
    """The component and its arguments."""
    seed: int
    steps: int | None
    """The steps of the undisturbed run. None: the job runs anyway."""
    took_s: float
    """By the undisturbed run."""
    rows: tuple[Row, ...]
    planned: int = 0
    """How many faults were to be tried. There are fewer rows if it was ended early."""
    notes: tuple[str, ...] = ()
    """What the rehearsal has added to the command."""

    @property
    def is_good(self) -> bool:
        """Everything that was tried was survived, and it was not ended early."""
        return len(self.rows) >= self.planned and not any(row.verdict.is_bad for row in self.rows)

    def describe(self) -> str:
        """Say what it was compared with: "100 steps in 12.0 s undisturbed; seed 7"."""
        first = "" if self.steps is None else f"{self.steps} steps in {self.took_s:.1f} s undisturbed; "
        early = "" if len(self.rows) >= self.planned else f"; {len(self.rows)} of {self.planned} faults done"
        return f"{first}seed {self.seed}{early}"

    def list_advice(self) -> list[tuple[str, str, str]]:
        """Return what to change: name, text and page, each once, in the order of the rows."""
        names = dict.fromkeys(name for row in self.rows for name in row.advice)
        return [(name, ADVICE[name].text, ADVICE[name].page) for name in names]


_NO_XML: Final = re.compile("[\ufffe\uffff]")
"""Beside what `show_controls` replaces: what XML cannot have."""
HEAD: Final = ("fault", "at", "verdict", "recovery", "repeated", "result")


def build_table(report: Report) -> str:
    """Return the table as text, with what to change below."""
    cells = [HEAD, *(list_cells(row) for row in report.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD) - 1)]
    lines = [
        f"{report.command}: {report.describe()}",
        *report.notes,
        "",
        *(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in cells
        ),
    ]
    reasons = [f"{row.name}: {row.verdict.value}: {row.reason}" for row in report.rows if row.reason]
    lines += ["", *reasons] if reasons else []
    advice = [f"- {text} ({page})" for _, text, page in report.list_advice()]
    lines += ["", "what to change:", *advice] if advice else []
    return "\n".join(show_controls(line) for line in lines) + "\n"


def list_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, as text."""
    recovery = "" if row.recovery_s is None else f"{row.recovery_s:.1f} s"
    repeated = "" if row.repeated is None else f"{row.repeated}"
    return row.title, row.at, row.verdict.value, recovery, repeated, row.result


def build_json(report: Report) -> dict[str, Any]:
    """Return what docs/rehearse.md promises of `--json`."""
    rows = []
    for row in report.rows:
        data = asdict(row) | {"verdict": row.verdict.value, "advice": list(row.advice)}
        data["recovery_s"] = None if row.recovery_s is None else round(row.recovery_s, 3)
        rows.append(data)
    return {
        "command": report.command,
        "seed": report.seed,
        "survived": report.is_good,
        "undisturbed": None if report.steps is None else {"steps": report.steps, "took_s": round(report.took_s, 3)},
        "planned": report.planned,
        "notes": list(report.notes),
        "rows": rows,
        "advice": [{"name": name, "text": text, "page": page} for name, text, page in report.list_advice()],
    }


def build_junit(report: Report) -> str:
    """Build JUnit XML: a test case for each fault. What was not tried is skipped."""
    counts = {
        "tests": len(report.rows),
        "failures": sum(row.verdict.is_bad for row in report.rows),
        "skipped": sum(row.verdict is Verdict.NOT_TRIED for row in report.rows),
    }
    suite = ET.Element("testsuite", {"name": "muster rehearse", **{name: str(count) for name, count in counts.items()}})
    for row in report.rows:
        case = ET.SubElement(suite, "testcase", {"classname": "rehearse", "name": row.name})
        case.set("time", f"{row.recovery_s or 0.0:.3f}")
        text = show_controls("; ".join(filter(None, (row.title, row.at, row.result, row.reason))))
        if row.verdict is Verdict.NOT_TRIED:
            ET.SubElement(case, "skipped", {"message": show_controls(row.reason)})
        elif row.verdict.is_bad:
            failure = ET.SubElement(case, "failure", {"message": f"{row.verdict.value}: {text}"})
            failure.text = "\n".join(f"{ADVICE[name].text} ({ADVICE[name].page})" for name in row.advice)
    ET.indent(suite)
    text = _NO_XML.sub("?", ET.tostring(suite, encoding="unicode"))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'
