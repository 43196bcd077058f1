"""Scripts to copy load no pickle: whoever can write a checkpoint would run code as the job."""

import ast
from collections.abc import Iterator

import doc_pages
import pytest

LOADS = {"torch.load", "trainer.fit"}


def list_sources() -> Iterator[tuple[str, str]]:
    for path in sorted((doc_pages.ROOT / "examples").rglob("*.py")):
        yield path.relative_to(doc_pages.ROOT).as_posix(), path.read_text()
    for page in doc_pages.list_pages():
        for block in doc_pages.read_blocks(page):
            if block.language == "python":
                yield block.where, block.text


@pytest.mark.parametrize(("where", "source"), [pytest.param(*each, id=each[0]) for each in list_sources()])
def test_a_checkpoint_is_loaded_as_weights_only(where: str, source: str) -> None:
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in LOADS:
            given = {each.arg: ast.unparse(each.value) for each in call.keywords}
            assert given.get("weights_only") == "True", f"{where}, line {call.lineno}: {ast.unparse(call)}"
