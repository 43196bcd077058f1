"""Patterns of Kubernetes' names and values, to refuse offline what the API server would refuse later.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and labels/, and validation.go of
k8s.io/apimachinery. Each pattern is for `fullmatch`.
"""

import re
from typing import Final

NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Name of most objects: a DNS subdomain."""

LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Name of a namespace: a DNS label."""

LABEL_KEY: Final = re.compile(
    r"((?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)

RESOURCE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
"""Name of a device: DOMAIN/RESOURCE."""

CACHE: Final = re.compile(rf"{NAME.pattern}|/[^:\0]+", re.ASCII)
"""A claim, or a folder of the nodes."""
QUANTITY: Final = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
"""A size."""

INDEXED_LIMIT: Final = 100_000
"""Number of pods of one Indexed Job."""

COUNT_LIMIT: Final = 2**31 - 1
"""The API's integers have 32 bits."""
