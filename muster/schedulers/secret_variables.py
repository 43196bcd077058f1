"""Decides which environment variables and arguments are secret. Secrets are masked in what is printed and stored.

A variable is secret by its name or by its value. On Kubernetes a secret one travels in a Secret, so a variable that is
taken for one by mistake still reaches the job.

- By name: one of its words is TOKEN, SECRET, PASSWORD, KEY, PAT, DSN... (`_WORDS`), or ends like one (`HFTOKEN`).
  TOKENIZERS_PARALLELISM and KEYBOARD are not. MAX_TOKENS=4096 is a number, and SSH_KEY_PATH names a file: neither is.
- By value: a URL with a password or of a webhook, a private key, a connection string, JSON with a password (Docker's
  `auths`), or the beginning of a token of a known service.
- An argument by its flag's name (`--api_key=`, `--api-key VALUE`, `db.password=`) and by its value.

This is a heuristic: what it does not know is printed. `ps` shows all arguments. Only what a component took from a file
or from its caller's environment is certain: those variables are named in the role's metadata, and always secret.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Final

from muster._shared.contract import Env, RoleKey

MASK: Final = "***"

_WORDS: Final = frozenset(
    {"TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASS", "CREDENTIAL", "CREDENTIALS"}
    | {"KEY", "APIKEY", "PAT", "PWD", "DSN", "AUTH", "COOKIE", "WEBHOOK", "SAS", "JWT", "BEARER"}
    | {"CRED", "CREDS", "PRIVKEY", "NETRC", "HEADERS", "SSHPASS", "DBPASS"}
)
_PLURALS: Final = frozenset({"TOKENS", "KEYS"})
"""Secret unless the value is a number: MAX_TOKENS."""

_ENDINGS: Final = (
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "APIKEY",
    "ACCESSKEY",
    "SECRETKEY",
    "PRIVATEKEY",
)
"""Endings of a word: HFTOKEN, PGPASSWORD."""

_PHRASES: Final = ("DATABASE_URL", "DB_URL", "REDIS_URL", "MONGO_URL", "CONNECTION_STRING", "CONN_STR")
"""Parts of names whose value usually has a password in it."""

_PLACES: Final = ("PATH", "FILE", "DIR", "FOLDER")
"""Last words of a variable that says where a secret is."""

_NOT_SECRET: Final = frozenset({"PWD", "OLDPWD", Env.REQUIRE_TOKEN, "SSH_AUTH_SOCK"})

_VALUES: Final = r"""
      ^[a-z][a-z0-9+.-]*://[^/\s@:]*:[^/\s@]+@           # a URL with a password
    | ^[a-z][a-z0-9+.-]*://[^/\s@:]{20,}@               # a URL with a token
    | ://hooks\.slack\.com/ | ://(\w+\.)?discord(app)?\.com/api/webhooks/ | \.webhook\.office\.com/webhookb2/
    | ://\S*/(web)?hooks?/ | ://api\.telegram\.org/bot
    | (^|;)\s*(AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)=[^;\s]    # a connection string
    # a part of JSON, as .docker/config.json has it
    | ["'](auth|identitytoken|password|passwd|token|access_token|api_?key|secret|private_key)["']\s*:\s*["'][^"']
    | \b(Bearer|Basic)[ ]+[A-Za-z0-9._~+/=-]{8,}
    | (?<![A-Za-z0-9])(gh[pousr]|github_pat|glpat|nvapi|xox[abprs])[_-][A-Za-z0-9_-]{16,}
    | (?<![A-Za-z0-9_])hf_[A-Za-z0-9]{16,}
    | [?&;](password|passwd|pwd|token|access_token|(api_?)?key|secret|sig|signature|x-amz-signature)=[^&\s]
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----
    | ^(ghp|gho|ghu|ghs|ghr|github_pat|glpat|xox[abprs]|hf|sk|pk|rk|npm|pypi|dop_v1)[_-][A-Za-z0-9_-]{16,}$
    | ^(AKIA|ASIA)[A-Z0-9]{16}$ | ^AIza[A-Za-z0-9_-]{30,}$
    | ^eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.             # a JWT
    """
_NUMBER: Final = re.compile(r"[+-]?\d*\.?\d+", re.ASCII)


@cache
def _compile_values() -> re.Pattern[str]:
    """Compile the pattern when it is first needed: `torchx list` does without its 3 ms."""
    return re.compile(_VALUES, re.VERBOSE | re.IGNORECASE | re.DOTALL)


def list_named_secrets(metadata: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return the variables that a role's metadata names as secret (`RoleKey.SECRET_ENV`)."""
    return tuple(filter(None, str((metadata or {}).get(RoleKey.SECRET_ENV, "")).split(",")))


def mask_env(env: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Return a copy of an environment for printing, with `***` for the values of secrets.

    Args:
        env: not changed.
        named: variables that are secret whatever they look like, see `list_named_secrets`.
    """
    secret = frozenset(named)
    return {name: MASK if name in secret or is_secret(name, value) else value for name, value in env.items()}


def mask_args(args: Sequence[str]) -> list[str]:
    """Return a copy of a command line for printing, with `***` for secrets."""
    shown: list[str] = []
    is_value = False
    for arg in args:
        name, sign, value = arg.partition("=")
        if is_value and not arg.startswith("-"):
            shown.append(MASK)
        elif sign and is_secret(name.lstrip("-"), value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(MASK if _compile_values().search(arg) else arg)
        is_value = arg.startswith("-") and not sign and is_secret(arg.lstrip("-"), "a value")
    return shown


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable must not be printed. See the module's rules."""
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    if upper in _NOT_SECRET or not value:
        return False
    return _compile_values().search(value) is not None or _has_secret_name(upper, value)


def _has_secret_name(upper: str, value: str) -> bool:
    words = [word for word in re.split(r"[^A-Z0-9]+", upper) if word]
    if not words or words[-1] in _PLACES:
        return False
    if any(phrase in upper for phrase in _PHRASES) or not _WORDS.isdisjoint(words):
        return True
    if not _PLURALS.isdisjoint(words):
        return _NUMBER.fullmatch(value) is None
    return any(word.endswith(_ENDINGS) for word in words)
