"""Builds every name that an adapter gives to an app, a role, a replica or an object on an engine.

Names are DNS labels (RFC 1123, and beginning with a letter as RFC 1035 wants for services): lower-case letters,
digits and hyphens, at most 63 characters. Kubernetes requires this for almost every name, Docker accepts it for
containers, networks and host names, and it is a good folder name. A name that is too long keeps its beginning and gets
a hash of the whole, so that equal names stay equal and different names differ.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from typing import Final

LABEL_LIMIT: Final = 63

LOOPBACK: Final = "127.0.0.1"
"""Where the replicas of a machine reach each other. Not `localhost`: that may resolve to ::1 first, or not at all."""
_HASH_LENGTH: Final = 6
_TOKEN_LENGTH: Final = 8
_LETTERS: Final = "bcdfghjklmnpqrstvwxz"  # no vowels: no words by accident
_DIGITS_AND_LETTERS: Final = _LETTERS + "0123456789"
_NOT_ALLOWED = re.compile(r"[^a-z0-9-]+")


def make_suffix() -> str:
    """Return a random suffix that makes an app's name unique: 8 characters, about 38 bits. It is not a secret."""
    first, *rest = os.urandom(_TOKEN_LENGTH)
    return _LETTERS[first % len(_LETTERS)] + "".join(_DIGITS_AND_LETTERS[byte % 30] for byte in rest)


def make_secret() -> str:
    """Return an app's secret, from which the tokens of its roles follow: 256 random bits as 64 hexadecimal digits."""
    return os.urandom(32).hex()


def derive_token(secret: str, role: str) -> str:
    """Derive the rendezvous token of one agent role. The role is a job of its own, and must not admit others' nodes.

    Args:
        secret: the app's, from `make_secret`. Only adapters hold it: it cannot be derived from the token of a role.
        role: name as in the AppDef.

    Returns:
        64 hexadecimal digits.
    """
    return hmac.new(secret.encode(), f"role {role}".encode(), hashlib.sha256).hexdigest()


def build_label(text: str, *, limit: int = LABEL_LIMIT) -> str:
    """Return a DNS label for any text. Valid labels within the limit stay as they are.

    Args:
        text: any text, such as a name from an AppDef.
        limit: greatest length, at least 16.
    """
    label = _clean(text) or "app"
    if not label[0].isalpha():
        label = f"app-{label}"
    return label if len(label) <= limit else _shorten(label, text, limit)


def build_app_name(name: str, suffix: str, *, reserve: int = 0) -> str:
    """Return the name of an app: its AppDef's name and a suffix from `make_suffix`.

    Args:
        name: `AppDef.name`.
        suffix: distinguishes apps of the same name. It is kept whole.
        reserve: characters that will be appended to the name elsewhere and must fit into a label too (a hyphen and
            the digits of an index, say).
    """
    return f"{build_label(name, limit=LABEL_LIMIT - reserve - len(suffix) - 1)}-{suffix}"


def build_role_labels(roles: Sequence[str], *, limit: int = 20) -> dict[str, str]:
    """Return a label for each role, different for different roles.

    Args:
        roles: names as in the AppDef. `runner.roles.check_roles` refuses names that repeat.
        limit: greatest length of a label, at least 16.
    """
    labels = {role: build_label(role, limit=limit) for role in roles}
    clashes = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {role: _shorten(label, role, limit) if label in clashes else label for role, label in labels.items()}


def build_replica_name(app_name: str, role_label: str, index: int) -> str:
    """Name one replica (container, host): app, role and index.

    The name has at most 63 characters, and keeps the index whole.
    """
    tail = f"-{index}"
    return build_label(f"{app_name}-{role_label}", limit=LABEL_LIMIT - len(tail)) + tail


def _clean(text: str) -> str:
    return re.sub(r"-{2,}", "-", _NOT_ALLOWED.sub("-", text.lower())).strip("-")


def _shorten(label: str, text: str, limit: int) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{label[: limit - _HASH_LENGTH - 1].rstrip('-')}-{digest}"
