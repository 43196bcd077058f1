"""The rules of `.torchxignore`, which are those of `.gitignore`: pure.

The last line that matches a path decides. A line without a slash, or with one only at its end, names files and folders
at any depth. Any other line names a path from the workspace's root. `build/` means folders only, `!` sends again, `**`
stands for any folders. Nothing in a folder that is left out can be sent again. Two things are as TorchX has them:
spaces before a line do not count, nor does a comment behind one (`notes  # mine`).

pathspec does not fit: 1.1 says that `*` leaves out the folder `src` though the line `!src` follows, and it would be the
first library that every adapter needs. The tests compare with git itself.

Source: https://git-scm.com/docs/gitignore#_pattern_format.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_COMMENT: Final = re.compile(r"(^|[ \t]+)#.*$")
_TRAILING_SPACES: Final = re.compile(r"(?<!\\)[ \t\r]+$")
_ESCAPED: Final = re.compile(r"\\.")
_WILDCARD: Final = re.compile(r"[*?[]")
_TOKEN: Final = re.compile(
    r"""
      (?P<folders>(?:(?<=/)|^)\*{2,}/)   # any folders, or none
    | (?P<content>(?<=/)\*{2,}$)         # all that is in a folder
    | (?P<stars>\*+)
    | (?P<one>\?)
    | \[(?P<negated>[!^]?)(?P<set>\]?(?:\\.|\[:\w+:\]|[^]\\])*)\]
    | \\(?P<escaped>.)
    | (?P<plain>[^\\[])
    """,
    re.VERBOSE,
)
_PART_OF_SET: Final = re.compile(r"\[:(?P<name>\w+):\]|(?P<first>\\.|[^\\])(?:-(?P<last>\\.|[^\\]))?", re.DOTALL)
_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\ \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, kw_only=True)
class IgnoreRule:
    """One line that names paths."""

    pattern: re.Pattern[str]
    """Matches a whole path, relative and with slashes."""
    keeps: bool
    """It sends what an earlier line leaves out."""
    folders_only: bool
    is_broad: bool
    """Its last part has a wildcard."""


def parse_rules(text: str) -> list[IgnoreRule]:
    """Parse the lines of a `.torchxignore`, in order. A line that git cannot use either matches nothing."""
    return [rule for line in text.split("\n") if (rule := _parse_line(line)) is not None]


def find_rule(rules: Sequence[IgnoreRule], path: str, *, is_folder: bool) -> IgnoreRule | None:
    """Return the rule that decides about a path, or None if no line matches."""
    for rule in reversed(rules):
        if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(path):
            return rule
    return None


def _parse_line(line: str) -> IgnoreRule | None:
    line = _TRAILING_SPACES.sub("", _COMMENT.sub("", line)).lstrip(" \t")
    keeps = line.startswith("!")
    glob = line[1:] if keeps else line
    folders_only = glob.endswith("/")
    glob = glob.removesuffix("/")
    if not glob:
        return None
    anywhere = "" if "/" in glob else "(?:.*/)?"
    translated = _translate(glob.removeprefix("/"))
    if translated is None:
        return None
    try:
        pattern = re.compile(anywhere + translated, re.DOTALL)
    except re.error:  # a class that does not exist
        return None
    is_broad = _WILDCARD.search(_ESCAPED.sub("", glob.rpartition("/")[2])) is not None
    return IgnoreRule(pattern=pattern, keeps=keeps, folders_only=folders_only, is_broad=is_broad)


def _translate(glob: str) -> str | None:
    """Return the regular expression of a glob. Return None if it ends within a set or after a backslash."""
    parts, at = [], 0
    while at < len(glob):
        token = _TOKEN.match(glob, at)
        if token is None:
            return None
        parts.append(_translate_token(token))
        at = token.end()
    return "".join(parts)


def _translate_token(token: re.Match[str]) -> str:
    fixed = {"folders": "(?:.*/)?", "content": ".+", "stars": "[^/]*", "one": "[^/]"}
    kind = str(token.lastgroup)
    if kind in fixed:
        return fixed[kind]
    if kind == "set":
        negation = "^" if token["negated"] else ""
        return f"(?!/)[{negation}{_translate_set(token['set'])}]"
    return re.escape(token[kind])


def _translate_set(content: str) -> str:
    def translate(part: re.Match[str]) -> str:
        if part["name"]:
            return _CLASSES.get(part["name"], "")
        first, last = (part[end] and re.sub(r"\\(.)", r"\1", part[end]) for end in ("first", "last"))
        if not last:
            return re.escape(first)
        return f"{re.escape(first)}-{re.escape(last)}" if first <= last else re.escape(first)  # as git does

    return _PART_OF_SET.sub(translate, content)
