"""How many asserts of the tests contain a sentence: at least four words in one line.

A sentence is to be in one table test of the module that words it. Other tests look for codes, facts, fields and
numbers, so that a sentence can be worded anew in one place. Counted are, each once:

- an `assert` that compares with a sentence, or looks for one: also in lists and f-strings, by `startswith` and the
  like, by `re.search`, and by the name of a text of the same function or module. What is passed to other functions is
  input, and what follows the comma of an `assert` is for people;
- a sentence as `match=` of `pytest.raises` and `pytest.warns`.

python benchmarks/sentence_asserts.py [--list] [FOLDER]
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
TABLES = {
    "unit/wording/test_words.py": "every reason of an app",
    "unit/wording/test_praised_lines.py": "what people praised",
    "unit/wording/test_situations.py": "what each adapter says in the same situations",
    "unit/schedulers/test_job_line.py": "the one line of a job: `wording.job_line`",
    "unit/diagnosis/test_report_text.py": "the page of a report: `diagnosis.report_text`",
    "unit/diagnosis/test_root_cause.py": "the reason of a report: `diagnosis.root_cause`",
    "unit/diagnosis/test_failures.py": "evidence and advice of one failure: `diagnosis.failures`",
    "unit/features/hangs/test_collectives.py": "which rank the others wait for: `hangs.collectives`",
    "unit/features/hangs/test_causes.py": "the same in the first line of a report",
    "unit/features/hangs/test_nccl_monitor.py": "the same from what NCCL's monitor says: `hangs.nccl_launches`",
    "unit/cli/test_afterwards.py": "the story that `muster timeline` tells: `afterwards.story`",
    "unit/node/test_summary.py": "the lines at the end of a job: `node.summary`",
    "unit/rendezvous/test_asking.py": "the answers to requests of people: `control.answers`",
    "unit/snapshots/test_snapshot_words.py": "what is said of snapshots in the status",
}
"""The tests of the functions that word something -> what that is."""
_OTHERS_SAY = ("Traceback (most recent call last)", "Too many open files", "No space left on device")
_OTHERS_SAY += ("Fatal Python error", "Address already in use", "No such file or directory", "Not a directory")
"""What Python and the system say is no wording of ours."""

_LEAST_WORDS = 4
_WORD = re.compile(r"[\"'(`]*[A-Za-z]+(?:['-][A-Za-z]+)*[\"')`]*[.,:;!?]*")
_SEARCHES = {"startswith", "endswith", "count", "find", "index", "removeprefix", "removesuffix", "partition", "split"}
_PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "compile", "escape"}
_EXPECTS = {"raises", "warns", "fail"}


def has_sentence(text: str, *, is_pattern: bool = False) -> bool:
    """Return whether a line of a text has four words."""
    if is_pattern:
        text = re.sub(r"\\([^\w\s]| )", r"\1", re.sub(r"\.[*+]\??|\\[A-Za-z][*+]?|[\^$]", " - ", text))
    for said in _OTHERS_SAY:
        text = text.replace(said, "-")
    return any(
        len([word for word in line.split() if _WORD.fullmatch(word)]) >= _LEAST_WORDS for line in text.split("\n")
    )


def find_asserts(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of asserts that contain a sentence."""
    texts = _find_texts(tree.body)
    yield from _find_in(tree, texts)


def _find_in(node: ast.AST, texts: Mapping[str, ast.expr]) -> Iterator[int]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _find_in(each, {**texts, **_find_texts(each.body)})
            continue
        if isinstance(each, ast.Assert) and _is_told(each.test, texts):
            yield each.lineno
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in _EXPECTS:
            patterns = [keyword.value for keyword in each.keywords if keyword.arg == "match"]
            if any(_is_sentence(part, texts, is_pattern=True) for part in patterns):
                yield each.lineno
        yield from _find_in(each, texts)


def _find_texts(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the texts that a function or module gives a name."""
    texts: dict[str, ast.expr] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # its names are its own
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            texts[node.targets[0].id] = node.value
        for name in ("body", "orelse", "finalbody"):
            texts.update(_find_texts(getattr(node, name, [])))
    return texts


def _is_told(test: ast.expr, texts: Mapping[str, ast.expr]) -> bool:
    """Return whether an expression compares with a sentence or looks for one."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            if any(_is_sentence(each, texts) for each in (node.left, *node.comparators)):
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_pattern = node.func.attr in _PATTERNS and isinstance(node.func.value, ast.Name)
            searches = node.func.attr in _SEARCHES
            if (is_pattern or searches) and any(_is_sentence(e, texts, is_pattern=is_pattern) for e in node.args[:1]):
                return True
    return False


def _is_sentence(node: ast.expr, texts: Mapping[str, ast.expr], *, is_pattern: bool = False, depth: int = 0) -> bool:
    """Return whether a text, or one in a list of them, is a sentence. Arguments of functions are none."""

    def look(each: ast.expr) -> bool:
        return _is_sentence(each, texts, is_pattern=is_pattern, depth=depth + 1)

    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and has_sentence(node.value, is_pattern=is_pattern)
    if isinstance(node, ast.JoinedStr):
        parts = (str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
        return has_sentence("".join(parts), is_pattern=is_pattern)
    if isinstance(node, ast.Name):
        return node.id in texts and depth < 3 and look(texts[node.id])
    if isinstance(node, ast.BinOp):
        return look(node.left) or look(node.right)
    if isinstance(node, ast.IfExp):
        return look(node.body) or look(node.orelse)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return any(map(look, node.elts))
    if isinstance(node, ast.Dict):
        return any(look(each) for each in (*filter(None, node.keys), *node.values))
    if isinstance(node, ast.Starred):
        return look(node.value)
    return False


def main() -> None:
    """Print the sum by folder, and the files with most."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=TESTS)
    parser.add_argument("--list", action="store_true", help="print the line of each")
    args = parser.parse_args()
    files: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for path in sorted(args.folder.rglob("*.py")):
        name = path.relative_to(args.folder).as_posix()
        if name in TABLES:
            continue
        try:
            lines = sorted(set(find_asserts(ast.parse(path.read_bytes()))))
        except SyntaxError:
            continue  # a program of the tests that is wrong on purpose
        if args.list and lines:
            source = path.read_text().splitlines()
            print(*(f"{name}:{line}: {source[line - 1].strip()}" for line in lines), sep="\n")
        files[name] += len(lines)
        folders["/".join(name.split("/")[:-1][:2]) or "."] += len(lines)
    for folder, count in sorted(folders.items()):
        if count:
            print(f"{folder:60} {count:5}")
    print()
    for name, count in files.most_common(20):
        print(f"{name:60} {count:5}")
    print(f"\n{'all, without the tables':60} {files.total():5}")


if __name__ == "__main__":
    main()
