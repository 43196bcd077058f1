"""What pyproject.toml cannot say.

Setuptools sorts entry points by name, but TorchX takes the first as its default. And it takes the license there in one
form before version 77, and in another from then on.
"""

from setuptools import setup
from setuptools.command.egg_info import egg_info

GROUP = "[torchx.schedulers]"
DEFAULT = "local_cwd"


def put_default_first(text: str) -> str:
    """Move the default scheduler's line directly below its group's heading."""
    lines = text.splitlines(keepends=True)
    heading = lines.index(f"{GROUP}\n")
    default = next(index for index, line in enumerate(lines) if line.startswith(f"{DEFAULT} ="))
    lines.insert(heading + 1, lines.pop(default))
    return "".join(lines)


class OrderedEggInfo(egg_info):
    """Writes entry points in the order that TorchX needs."""

    def write_file(self, what: str, filename: str, data: str) -> None:
        """As setuptools does, but for the order."""
        super().write_file(what, filename, put_default_first(data) if filename.endswith("entry_points.txt") else data)


setup(license="BSD-3-Clause", license_files=["LICENSE"], cmdclass={"egg_info": OrderedEggInfo})
