"""The code blocks of README, CONTRIBUTING, SKILL and docs/: what runs, and what is marked as needing more than this
machine.

A block runs as it stands, unless the line before it is one of two comments:

    <!-- needs-gpu -->
    <!-- needs-cluster -->

Blocks without a language, and `text`, are drawings and output. A `python` block whose first line is a comment with a
file's name is written to that file, and the commands below it run it. `ini` and `yaml` blocks are read by a parser.
"""

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("needs-gpu", "needs-cluster")
FOLDERS = ("muster", "docs", "examples", "benchmarks", ".ci", ".github")
"""What a copy of the repository has, beside the files at its top; other tests may be writing beside these."""
LEFT_OUT = shutil.ignore_patterns("__pycache__")
RUNNABLE = ("bash", "python", "ini", "yaml")
DRAWINGS = ("", "text")

_FENCE = re.compile(r"(`{3,})(.*)")
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->")
_FILE = re.compile(r"#\s*([\w./-]+\.\w+)\s*")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    """Relative to the repository."""
    line: int
    language: str
    text: str
    mark: str
    """"" or what the comment before it says."""

    @property
    def where(self):
        return f"{self.page}:{self.line}"

    @property
    def file(self):
        """Name of the file that the block is to be written to; None: it is run."""
        found = _FILE.fullmatch(self.text.split("\n", 1)[0]) if self.language == "python" else None
        return found[1] if found else None

    @property
    def is_dry_run(self):
        """Whether it has nothing but dry runs, whose output goes nowhere else."""
        return self.language == "bash" and all(
            line.startswith("torchx run --dryrun ") and not re.search("[|>]", line) for line in self.commands
        )

    @property
    def commands(self):
        """Its command lines: continued lines joined, no comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#\s.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def copy_repository(target):
    """Make a copy as a reader has it, without tests and environments."""
    target.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, target)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=LEFT_OUT)
    return target


def list_pages():
    """README, CONTRIBUTING, SECURITY, SKILL and every page that a person wrote, relative to the repository."""
    written = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", "muster/SKILL.md", *written]


def read_blocks(page):
    """The blocks of a page in order; `{directive}` fences of MyST are none."""
    blocks, fence, language, start, kept, mark = [], "", "", 0, [], ""
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        match = _FENCE.match(line.strip())
        if fence:
            if match and match[1] == fence and not match[2]:
                if not language.startswith("{"):
                    blocks.append(Block(page, start, language, "\n".join(kept) + "\n", mark))
                fence = mark = ""
            else:
                kept.append(line)
        elif match:
            fence, language, start, kept = match[1], match[2].strip(), number, []
        elif line.strip():
            comment = _COMMENT.fullmatch(line.strip())
            mark = comment[1] if comment else ""
    assert not fence, f"{page}:{start}: the block has no end"
    return blocks


if __name__ == "__main__":
    found = Counter(
        each.mark or "run" for page in list_pages() for each in read_blocks(page) if each.language not in DRAWINGS
    )
    print(", ".join(f"{count} {mark}" for mark, count in sorted(found.items())))
