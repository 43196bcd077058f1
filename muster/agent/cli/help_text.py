"""What `--help`, `--help-all` and `--print-completion` print. Only they load this module.

`--help` has the flags that people use: those that most command lines of torchrun have. `--help-all` has every flag, in
groups, with the flags of each feature under its name.
"""

import shutil
import textwrap
from typing import Final

from muster.agent.cli.flag_table import FLAGS, Flag, list_flags, list_groups
from muster.agent.errors import UsageError
from muster.agent.features import FLAG_OWNERS

_MOST_COLUMNS: Final = 110
_TEXT_COLUMN: Final = 31
"""Where the texts of `--help` begin."""

USAGE: Final = """\
usage: muster-agent [flags] script [arguments of the script]
       muster-agent --help | --help-all | --version
"""

ABOUT: Final = """\
Starts, watches and restarts the workers of one node of a distributed PyTorch job. Replaces torchrun: it has all of
torchrun's flags, abbreviations and PET_* variables, with the same meaning except where noted. Flags marked * are new.
"""

TAIL: Final = """\
A PET_<FLAG> variable (PET_NNODES, ...) is the default of every flag without *, except --logs-specs and --numa-binding.
${local_rank} in the script's arguments is replaced with the worker's local rank.

Logs are DIR/ID/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}; with more than one node
DIR/ID/node_INDEX/attempt_N/... (torchrun has no such folder). A restart begins a new attempt; a change of nodes
appends to the same files. DIR/ID also has events.jsonl and, after a failure, report.json.

TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE or --log-line-prefix-template replaces the prefix of console lines,
[${role_name}${local_rank}]: on one node and [${role_name}${local_rank}|n${node}.r${rank}]: on several. It may use
torchrun's ${role_name}, ${local_rank}, ${rank} and ${hostname}, and ${global_rank} (the same as ${rank}), ${node}
(group rank), ${node_index} (--node-rank), ${world_size}, ${nodes}, ${attempt} and ${round}. A line of more than 16 MiB
reaches the console in several pieces, each with the prefix; in the file it stays whole. A progress bar (text with
carriage returns) is one live line on a terminal, and elsewhere a line with its latest state every 5 s.

Differences from torchrun: The agent notices a dead worker or node at once and does not poll. A restart gets a fresh
store and, except with static, a fresh MASTER_PORT. Node 0 hosts rank 0 as long as it lives; when it is lost,
another node takes over. No process of the job outlives the agent, however the agent ends. If OMP_NUM_THREADS is unset,
it becomes cores // workers instead of 1, and a line says so. PYTHON_EXEC is honoured and means a cold start.

Exit codes: 0 all workers succeeded; 1 workers failed, and no restart is left or a verdict has stopped the job; 2 usage
error; 69 the nodes did not find each other in time or lost each other, or this node left the job; 128+n ended by signal
n.
"""


COMPLETIONS: Final = {
    "bash": 'complete -o default -W "{dashed}" muster-agent',
    "zsh": "#compdef muster-agent\ncompadd -- {dashed}\n_files",
    "tcsh": "complete muster-agent 'c/--/({names})/' 'p/*/f/'",
}


def format_completion(shell: str | None) -> str:
    """Return what completes the flags and file names in a shell. torchrun's needs a package for this.

    Raises:
        UsageError: it is another shell.
    """
    if shell not in COMPLETIONS:
        raise UsageError(f"--print-completion {shell!r}: must be one of {', '.join(COMPLETIONS)}")
    names = [*(flag.name for flag in FLAGS), *FLAG_OWNERS, "help", "help-all", "version"]
    return COMPLETIONS[shell].format(names=" ".join(names), dashed=" ".join(f"--{name}" for name in names))


def choose_width() -> int:
    """Return how many columns a help may have here."""
    return min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 0)).columns)


def format_help(width: int = _MOST_COLUMNS) -> str:
    """Format the flags that people use, with the first sentence of each, for a terminal with this many columns."""
    parts = [USAGE, "Starts and restarts the workers of one node of a job, in place of torchrun.", ""]
    for title, flags in list_groups():
        rows = [_format_row(flag, width) for flag in flags if flag.is_common]
        parts += [f"{title}:", *rows] if rows else []
    count = len(list_flags())
    return "\n".join([*parts, "", f"--help-all prints all {count} flags in full, the log files and the exit codes."])


def _format_row(flag: Flag, width: int) -> str:
    """Format a flag and its first sentence in two columns."""
    words = f"  {_spell(flag)}"
    sentence = f"{flag.text.partition('. ')[0].rstrip('.')}.{_format_default(flag)}"
    beside = words.ljust(_TEXT_COLUMN - 2) + "  "
    return textwrap.fill(
        sentence, width, initial_indent=beside, subsequent_indent=" " * _TEXT_COLUMN, break_on_hyphens=False
    )


def format_help_all(width: int = _MOST_COLUMNS) -> str:
    """Format all flags with their texts, for a terminal with this many columns."""
    parts = [USAGE, _fill_paragraphs(ABOUT, width)]
    for title, flags in list_groups():
        parts.append(f"{title}:")
        for flag in flags:
            parts.append(f"  {_spell(flag)}{' *' if flag.ours else ''}{_format_default(flag)}")
            parts.append(textwrap.indent(_fill_paragraphs(flag.text, width - 6).rstrip(), " " * 6))
        parts.append("")
    return "\n".join([*parts, _fill_paragraphs(TAIL, width)])


def _spell(flag: Flag) -> str:
    spelling = f"-{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
    return f"{spelling} {flag.metavar}".rstrip()


def _format_default(flag: Flag) -> str:
    return f" [{flag.default}]" if flag.default else ""


def _fill_paragraphs(text: str, width: int) -> str:
    """Wrap each paragraph, except those with indented lines."""
    paragraphs = text.rstrip().split("\n\n")
    filled = [
        each if "\n " in each else textwrap.fill(each, width, break_long_words=False, break_on_hyphens=False)
        for each in paragraphs
    ]
    return "\n\n".join(filled) + "\n"
