"""Parses scheduler options (`-cfg`) strictly and in the same way on both TorchX lines.

TorchX 0.7 ignores keys it does not know, and reads any word but "true" as false. The nightly refuses both, but its
command line parses `-cfg` outside the code that catches errors, so the user sees a traceback. Here parsing never fails.
Invalid text is kept as it is until `resolve`, which both command lines call where an error becomes one line.
"""

import contextlib
import difflib
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torchx.specs.api import runopts

from muster.schedulers.errors import OptionError

_TRUE: Final = ("true", "1", "yes", "on")
FALSE_WORDS: Final = ("false", "0", "no", "off")
# 0.7 compares with typing's.
_TYPES: Final[Mapping[Any, Any]] = {list[str]: typing.List[str], dict[str, str]: typing.Dict[str, str]}  # noqa: UP006


_NEAR: Final = 0.7
"""How alike two names must be for a suggestion, from 0 to 1."""
_MOST_MEANT: Final = 3
"""How many names are suggested."""
_SEPARATOR = re.compile(r"[,;]")
_BRACED_VALUE = re.compile(r"\s*[\w.-]+\s*=\s*\{")
_BRACE_OR_QUOTED = re.compile(r"""[{}]|"(?:[^"\\]|\\.)*"|'[^']*'""")


class StrictOpts(runopts):  # type: ignore[misc]
    """`runopts` whose errors suggest the right spelling. Return one from `_run_opts`.

    Args:
        scheduler: the scheduler's name, for messages.
    """

    def __init__(self, scheduler: str) -> None:
        super().__init__()
        self._scheduler = scheduler

    @property
    def _declared(self) -> dict[str, Any]:
        """The options by name: iteration is public on both lines, the dictionary behind it is not."""
        return dict(iter(self))

    def add(self, cfg_key: str, type_: Any, help: str, default: Any = None, required: bool = False) -> None:  # noqa: A002  # TorchX's name
        """Declare an option. See `torchx.specs.runopts.add`."""
        super().add(cfg_key, type_=_TYPES.get(type_, type_), help=help, default=default, required=required)

    def cfg_from_str(self, cfg_str: str | None) -> dict[str, Any]:
        """Split `key=value,key=value`. Values stay words until `resolve`."""
        return dict(_split(cfg_str or ""))

    def cfg_from_json_repr(self, json_repr: str, *, ignore_unknown: bool = False) -> dict[str, Any]:
        """Read the JSON as the nightly does, but let `resolve` check unknown keys."""
        import json

        cfg: dict[str, Any] = json.loads(json_repr)
        return {key: value for key, value in cfg.items() if not ignore_unknown or self._find(key)}

    def resolve(self, cfg: Mapping[str, Any], *, ignore_unknown: bool = False) -> dict[str, Any]:
        """Check keys and values, turns words into values, fills in defaults.

        Raises:
            OptionError: an unknown key, a value of another type, a required key that is missing.
        """
        resolved: dict[str, Any] = {}
        before = ""
        for given, value in cfg.items():
            key = self._find(given)
            if key is None:
                if not ignore_unknown:
                    raise OptionError(self._explain_unknown(given, before), given, cfg)
                resolved[given] = value
                continue
            before = key
            parsed = self._parse(key, value, cfg)
            if key in resolved and resolved[key] != parsed:
                raise OptionError(
                    f"option {key!r} of {self._scheduler} is given twice, with different values", key, cfg
                )
            resolved[key] = parsed
        for key, option in self._declared.items():
            if option.is_required and resolved.get(key) is None:
                raise OptionError(f"{self._scheduler} needs the option {key!r} ({option.help})", key, cfg)
            # None means the default, as in 0.7.
            if resolved.get(key) is None:
                resolved[key] = option.default
        return resolved

    def _find(self, given: str) -> str | None:
        if given in self._declared:
            return given
        snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", given).lower()  # the nightly takes camelCase too
        return snake if snake in self._declared else None

    def _explain_unknown(self, given: str, before: str) -> str:
        names = sorted(self._declared)
        # Help has the name that others give it in brackets.
        close = [name for name in names if f"({given})".lower() in self._declared[name].help.lower()]
        close = close or difflib.get_close_matches(given.lower(), names, n=_MOST_MEANT, cutoff=_NEAR)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        if not close and before and self._declared[before].opt_type in _TYPES.values():
            hint = f"as a part of {before!r} write {given}:VALUE; "
        where = f"`torchx runopts {self._scheduler}` lists all" if names else "it has none"
        return f"{self._scheduler} has no option {given!r}; {hint}{where}"

    def _parse(self, key: str, value: Any, cfg: Mapping[str, Any]) -> Any:
        kind = self._declared[key].opt_type
        parse, wanted = _PARSERS[kind]
        with contextlib.suppress(ValueError):
            if isinstance(value, str) and kind is not str:
                return parse(value)
            if value is None or _is_of(value, kind):
                return value
        raise OptionError(f"option {key!r} of {self._scheduler} must be {wanted}, not {value!r}", key, cfg)


def _split(text: str) -> list[tuple[str, str]]:
    """Return TorchX's grammar: `k=v` separated by `,` or `;`, where a word without `=` continues the list before it.

    A value that begins with `{` ends at its matching `}`: inline JSON has separators of its own.
    """
    pairs: list[tuple[str, str]] = []
    for word in (part for part in _split_words(text) if part.strip()):
        key, found, value = word.partition("=")
        if found and re.fullmatch(r"\s*[\w.-]+\s*", key):
            pairs.append((key.strip(), value))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{word}")
        else:
            pairs.append((word.strip(), ""))  # not key=value: `resolve` refuses it
    return pairs


def _split_words(text: str) -> Iterator[str]:
    start = 0
    while start <= len(text):
        separator = _SEPARATOR.search(text, _skip_braces(text, start))
        end = separator.start() if separator else len(text)
        yield text[start:end]
        start = end + 1


def _skip_braces(text: str, start: int) -> int:
    """Return where the braces end with which the value begins. Return `start` if it begins with none."""
    braced = _BRACED_VALUE.match(text, start)
    if braced is None:
        return start
    depth = 0
    for token in _BRACE_OR_QUOTED.finditer(text, braced.end() - 1):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)  # unbalanced: the option's parser reports it


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return bool(runopts.is_type(value, kind))


def _parse_bool(word: str) -> bool:
    lowered = word.strip().lower()
    if lowered not in _TRUE + FALSE_WORDS:
        raise ValueError(word)
    return lowered in _TRUE


def _parse_int(word: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", word.strip(), re.ASCII):
        raise ValueError(word)
    return int(word)


def _parse_float(word: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)", word.strip(), re.ASCII):
        raise ValueError(word)
    return float(word)


def _parse_list(word: str) -> list[str]:
    return [part for part in re.split(r"[,;]", word) if part]


def _parse_dict(word: str) -> dict[str, str]:
    """Split at the first `:` or `=` of each pair, as kubectl and Docker write labels."""
    pairs = [re.split("[:=]", part, maxsplit=1) for part in _parse_list(word)]
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError(word)
    return dict(pairs)


_PARSERS: Final[Mapping[Any, tuple[Callable[[str], Any], str]]] = {
    str: (str, "text"),
    bool: (_parse_bool, "one of true, 1, yes, on, false, 0, no, off"),
    int: (_parse_int, "a whole number"),
    float: (_parse_float, "a number"),
    typing.List[str]: (_parse_list, "words separated by ;"),  # noqa: UP006
    typing.Dict[str, str]: (_parse_dict, "key:value pairs separated by ;"),  # noqa: UP006
}
