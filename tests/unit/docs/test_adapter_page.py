"""The pages *Write an adapter* and *Finish an adapter* show the example as it is."""

from doc_pages import ROOT, read_blocks

EXAMPLE = ROOT / "examples" / "folders"
PAGES = ("docs/write-an-adapter.md", "docs/finish-an-adapter.md")


def test_the_pages_build_the_example():
    shown = {
        block.file: block.text.partition("\n")[2]
        for page in PAGES
        for block in read_blocks(page)
        if block.file is not None and block.file.startswith("folders/")
    }
    there = {f"folders/{path.name}": path.read_text() for path in EXAMPLE.glob("*.py")}
    assert shown == there
    lines = sum(text.count("\n") for text in there.values())
    assert lines <= 200
    assert f"four files, {lines} lines together" in " ".join((ROOT / PAGES[0]).read_text().split())


def test_the_example_knows_the_seam_only():
    for path in EXAMPLE.glob("*.py"):
        imported = [line.split()[1] for line in path.read_text().splitlines() if line.startswith(("from ", "import "))]
        ours = {name for name in imported if name.startswith("muster")}
        assert ours <= {"muster.schedulers.adapter"}, path
