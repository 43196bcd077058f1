"""A clock of the test's own."""


class HandClock:
    """Advances only when the test sets it."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def boottime_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s
