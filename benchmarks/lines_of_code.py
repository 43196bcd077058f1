"""How many lines of code each package has: without docstrings, comments and blank lines.

A statement of several lines counts all of them, a text that is a value, too. The numbers say whether a redesign says
fewer things twice; no line is to be shorter for them.

python benchmarks/lines_of_code.py [--depth N] [FOLDER ...]
"""

import argparse
import ast
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "muster"
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)


def count_lines(path: Path) -> int:
    """Count the lines of code of one file."""
    code: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
    return len(code - _find_docstrings(ast.parse(path.read_bytes())))


def _find_docstrings(tree: ast.Module) -> set[int]:
    """Return the lines of texts that are statements: docstrings, and what is said of a name below it."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def print_table(folder: Path, depth: int) -> None:
    """Print lines and files by package.

    Args:
        folder: with the packages.
        depth: how many levels of packages below it are told apart.
    """
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        parents = path.relative_to(folder.parent).parts[:-1]
        package = "/".join(parents[: depth + 1])
        try:
            lines[package] += count_lines(path)
        except SyntaxError:
            continue  # a program of the tests that is wrong on purpose
        files[package] += 1
    for package, count in sorted(lines.items()):
        print(f"{package:40} {count:7,} lines {files[package]:4} files")
    print(f"{f'{folder.name}, all of it':40} {lines.total():7,} lines {files.total():4} files")


def main() -> None:
    """Print a table of each folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--depth", type=int, default=2, help="levels of packages that are told apart (default: 2)")
    args = parser.parse_args()
    for folder in args.folders:
        print_table(folder.resolve(), args.depth)


if __name__ == "__main__":
    main()
