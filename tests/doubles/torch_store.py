"""A store of torch's, in this process."""

from collections.abc import Mapping
from types import MappingProxyType


class FakeStore:
    """What the agents ask of a `torch.distributed.Store`; nothing waits."""

    def __init__(self, values: Mapping[str, str] = MappingProxyType({})) -> None:
        self.values = dict(values)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + number)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)
