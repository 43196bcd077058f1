"""What pyproject.toml cannot say.

Setuptools sorts entry points by name, but TorchX takes the first as its default. It takes the license there in one form
before version 77, and in another from then on. And README's links are relative, which a package index cannot follow.
"""

import re
from pathlib import Path

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


def make_links_absolute(text: str, project: str) -> str:
    """Make the links of README absolute, if `project`, the text of pyproject.toml, has the repository's address."""
    found = re.search(r'^Repository = "(https://[^"]+?)/?"$', project, re.MULTILINE)
    if found is None:
        return text
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)#]+)\)", rf"![\1]({found[1]}/raw/main/\2)", text)
    return re.sub(r"(?<!\!)(\[[^\]]+\])\((?!https?:|#)([^)]+)\)", rf"\1({found[1]}/blob/main/\2)", text)


class OrderedEggInfo(egg_info):
    """Writes entry points in the order that TorchX needs."""

    def write_file(self, what: str, filename: str, data: str) -> None:
        """As setuptools does, but for the order."""
        super().write_file(what, filename, put_default_first(data) if filename.endswith("entry_points.txt") else data)


if __name__ == "__main__":
    HERE = Path(__file__).parent
    setup(
        license="BSD-3-Clause",
        license_files=["LICENSE"],
        long_description=make_links_absolute((HERE / "README.md").read_text(), (HERE / "pyproject.toml").read_text()),
        long_description_content_type="text/markdown",
        cmdclass={"egg_info": OrderedEggInfo},
    )
