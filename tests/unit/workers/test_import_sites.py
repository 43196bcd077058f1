"""Which warnings filters are in force where a program imports a module."""

import sys
import warnings
from pathlib import Path

import pytest

from muster.agent.workers.warm.import_sites import FilterCall, Filters, ImportSite, ImportSites, import_at_site

IGNORE = FilterCall(name="filterwarnings", args=("ignore",))
SIMPLE = FilterCall(name="simplefilter", args=("ignore",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def find(folder: Path, source: str, name: str = "torch") -> ImportSite:
    (folder / "main.py").write_text(f"import warnings\n{source}\n")
    return ImportSites("script", str(folder / "main.py")).find(name)


@pytest.mark.parametrize(
    ("source", "filters"),
    [
        ("import torch", ()),
        ("warnings.filterwarnings('ignore')\nimport torch", (IGNORE,)),
        ("from warnings import filterwarnings\nfilterwarnings('ignore')\nimport torch", (IGNORE,)),
        ("import warnings as w\nw.simplefilter('ignore')\nfrom torch import nn", (SIMPLE,)),
        ("import torch\nwarnings.filterwarnings('ignore')", ()),
        pytest.param(
            f"text = {' + '.join(['str()'] * 1500)}\nimport torch", (), id="deeper than the limit of recursion"
        ),
        ("warnings.filterwarnings('ignore')\ndef main():\n    import torch", (IGNORE,)),
        ("def main():\n    import torch\nwarnings.filterwarnings('ignore')\nmain()", (IGNORE,)),
        ("import torch\ndef main():\n    warnings.simplefilter('ignore')", ()),
        ("if __name__ == '__main__':\n    warnings.simplefilter('ignore')\n    import torch", (SIMPLE,)),
        ("with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    import torch", (SIMPLE,)),
        ("with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\nimport torch", ()),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", ()),
        ("warnings.filterwarnings('ignore')\nif True:\n    import torch", (IGNORE,)),
        ("warnings.filterwarnings(action, append=True)\nimport torch", None),
        ("warnings.filterwarnings(*words)\nimport torch", None),
        ("warnings.filterwarnings('ignore', category=np.Odd)\nimport torch", None),
        ("if quiet:\n    warnings.filterwarnings('ignore')\nimport torch", None),
        ("def calm():\n    warnings.simplefilter('ignore')\ncalm()\nimport torch", None),
        ("with warnings.catch_warnings(record=True):\n    import torch", None),
        ("warnings.resetwarnings()\nimport torch", None),
        ("warnings.showwarning = print\nimport torch", None),
        ("warnings.filters.clear()\nimport torch", None),
        ("import logging\nlogging.captureWarnings(True)\nimport torch", None),
        ("data.filters = 3\nimport torch", ()),
        ("import lightning", None),
        ("this is not python", ()),
    ],
)
def test_filters_in_force(folder: Path, source: str, filters: Filters) -> None:
    assert find(folder, source).filters == filters


def test_keywords_and_categories(folder: Path) -> None:
    line = "warnings.filterwarnings('ignore', 'a.*', FutureWarning, lineno=3, append=True)"
    keywords = (("lineno", 3), ("append", True))
    call = FilterCall(name="filterwarnings", args=("ignore", "a.*", FutureWarning), keywords=keywords)
    assert find(folder, f"{line}\nimport torch").filters == (call,)


def test_the_site_is_where_it_is_imported_first(folder: Path) -> None:
    (folder / "trainer.py").write_text("import warnings\nwarnings.filterwarnings('ignore')\n\nimport torch.nn\n")
    site = find(folder, "import trainer\nimport torch")
    assert site == ImportSite(filters=(IGNORE,), path=str(folder / "trainer.py"), lineno=4, module="trainer")
    assert find(folder, "import torch\nimport trainer").path == str(folder / "main.py")


def test_a_module_that_the_program_does_not_name_is_imported_after_all_others(folder: Path) -> None:
    assert find(folder, "warnings.filterwarnings('ignore')", "numpy") == ImportSite(filters=(IGNORE,))


def test_filters_are_removed_and_those_of_the_import_stay(folder: Path) -> None:
    (folder / "sets_filter.py").write_text("import warnings\nwarnings.filterwarnings('ignore', 'of the import')\n")
    with warnings.catch_warnings():
        before = list(warnings.filters)
        import_at_site("sets_filter", ImportSite(filters=(IGNORE,)))
        assert len(warnings.filters) == len(before) + 1
        assert warnings.filters[1:] == before


def test_a_name_that_is_not_a_module_raises() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_at_site("no-such", ImportSite(filters=()))


@pytest.mark.parametrize(("filters", "shown"), [((), [("importer.py", 7)]), (None, []), ((IGNORE,), [])])
def test_a_warning_names_the_importing_line(folder: Path, filters: Filters, shown: list[tuple[str, int]]) -> None:
    (folder / "odd_import.py").write_text("import warnings\nwarnings.warn('odd', stacklevel=2)\n")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        import_at_site("odd_import", ImportSite(filters=filters, path="importer.py", lineno=7))
    assert [(warning.filename, warning.lineno) for warning in seen] == shown
    del sys.modules["odd_import"]
