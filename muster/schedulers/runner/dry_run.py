"""Dry runs: no secret in what TorchX itself prints of them.

The list of `callers` says which parts of TorchX this relies on. The AppDef of a dry run is a copy in which the values
of secret variables print as `***`. For programs, and in JSON, they are what they were. A version that prints an AppDef
in another way may show them. The request is built before, from the caller's AppDef.
"""

from dataclasses import replace

import yaml
from torchx.specs import AppDef, AppDryRunInfo, Role

from muster.schedulers.secret_variables import MASK, is_secret, list_named_secrets, mask_args


class SecretText(str):
    """Text whose `repr` shows nothing of it, or another text."""

    __slots__ = ("shown",)
    shown: str
    """What `repr` is of."""

    def __new__(cls, text: str, shown: str = MASK) -> "SecretText":  # noqa: PYI034  # `Self` is newer than Python 3.10
        """Make one with this `repr`."""
        made = super().__new__(cls, text)
        made.shown = shown
        return made

    def __repr__(self) -> str:
        return repr(self.shown)


# YAML refuses unknown classes.
for _dumper in (yaml.Dumper, yaml.SafeDumper):
    yaml.add_representer(SecretText, lambda dumper, text: dumper.represent_str(str(text)), Dumper=_dumper)


def hide_secrets(info: AppDryRunInfo) -> AppDryRunInfo:
    """Give a dry run a copy of its AppDef that prints no secret. Returns the same dry run."""
    app = get_app(info)
    if app is not None:
        setattr(info, _find_field(info), _hide_in_app(app))
    return info


def get_app(info: AppDryRunInfo) -> AppDef | None:
    """Return the AppDef of a dry run. None: it has not come from a runner."""
    return getattr(info, _find_field(info), None)


def _find_field(info: AppDryRunInfo) -> str:
    return "app" if hasattr(info, "app") else "_app"  # the nightly, 0.7


def _hide_in_app(app: AppDef) -> AppDef:
    def hide_arg(arg: str, shown: str) -> str:
        return arg if arg == shown else SecretText(arg, shown)

    def hide_in_role(role: Role) -> Role:
        named = frozenset(list_named_secrets(role.metadata))
        env = {
            key: SecretText(value) if key in named or is_secret(key, value) else value
            for key, value in role.env.items()
        }
        return replace(role, env=env, args=list(map(hide_arg, role.args, mask_args(role.args))))

    return replace(app, roles=list(map(hide_in_role, app.roles)))
