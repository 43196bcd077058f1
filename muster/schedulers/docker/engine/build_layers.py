"""Finds in the output of a build which layers it has made: pure."""

from typing import Final

_STEP: Final = "Step "
_ARROW: Final = "---> "
_CACHED: Final = "Using cache"
_RUNNING: Final = "Running in "


class BuildLayers:
    """Reads a build's output: `Step 2/6 : FROM $IMAGE`, `---> Using cache`, `---> Running in 6b1`, `---> 59aa`."""

    def __init__(self) -> None:
        self.new: list[str] = []
        """Ids of the layers that did not exist before, the oldest first."""
        self._is_known = False
        """The step's layer existed before: an image that the build begins with, or one of the cache."""

    def read(self, line: str) -> None:
        """Read one line, stripped."""
        if line.startswith(_STEP):
            _, _, instruction = line.partition(" : ")
            self._is_known = instruction.upper().startswith("FROM ")
        elif line.startswith(_ARROW):
            word = line.removeprefix(_ARROW)
            if word == _CACHED:
                self._is_known = True
            elif not word.startswith(_RUNNING) and not self._is_known:
                self.new.append(word)
