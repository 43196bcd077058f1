"""What `muster run dist.ddp --help` and `--help-all` print; `torchx run dist.ddp --help` is TorchX's own.

TorchX's parser prints every parameter, in the order of the signature, and has no way to leave one out. So the common
ones come first there.
"""

import inspect
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, Final

from torchx.specs.file_linter import get_fn_docstring

from muster.components.flags import FLAGS

COMMON: Final = ("script", "m", "j", "h", "gpu", "cpu", "memMB", "name", "image", "env", "mounts", "max_retries")
"""The parameters that people use: the program, how much of which machine, what containers need, and restarts. They come
first in every signature, in this order."""
_FEATURES: Final = {flag.name: flag.feature for flag in FLAGS if flag.feature}


def format_help(component: Callable[..., Any], defaults: Mapping[str, str], *, shows_all: bool) -> str:
    """Format the parameters of a component of this package.

    Args:
        component: the function.
        defaults: of `.torchxconfig`, by parameter.
        shows_all: whether all are shown, with those of each feature under its name; else those of `COMMON`.
    """
    about, texts = get_fn_docstring(component)
    summary, _, rest = about.partition("\nUsage: torchx ")
    example, _, more = rest.partition("\n")
    parser = ArgumentParser(
        usage=f"muster {example}",
        description=f"{summary} {more.strip()}",
        epilog=None if shows_all else f"`muster run dist.{component.__name__} --help-all` shows all parameters.",
        add_help=False,
    )
    groups: dict[str, Any] = {}
    for key, parameter in inspect.signature(component).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL or not (shows_all or key in COMMON):
            continue
        title = _choose_title(key)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = defaults.get(key, parameter.default)
        shown = "" if default in (None, "", False) else f" [{default}]"
        text = f"{texts[key]}{shown}".replace("%", "%%")
        groups[title].add_argument(f"-{key}" if len(key) == 1 else f"--{key}", metavar="", help=text)
    return parser.format_help()


def _choose_title(name: str) -> str:
    if name in COMMON:
        return "parameters"
    return f"feature {_FEATURES[name]}" if name in _FEATURES else "further parameters"
