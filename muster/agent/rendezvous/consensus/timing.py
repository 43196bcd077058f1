"""How long a node may be silent, and how much earlier its lease ends. Pure."""

from muster.agent.config import RendezvousConfig

MARGIN_S = 1.0


def find_silence_s(config: RendezvousConfig) -> float:
    """The silence limit: a node that is silent for this long counts as lost."""
    return config.keep_alive_interval_s * config.keep_alive_max_attempt


def find_margin_s(silence_s: float) -> float:
    """How long before the silence limit a lease ends: a second, less when the limit itself is short."""
    return min(MARGIN_S, silence_s / 3)
