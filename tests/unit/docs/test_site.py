"""What `docs/conf.py` does to the pages of the site."""

import importlib.util

import doc_pages


def load_conf():
    spec = importlib.util.spec_from_file_location("conf_of_docs", doc_pages.ROOT / "docs/conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_short_words_of_code_are_kept_whole_and_long_ones_may_break():
    path = "~/.local/state/muster/logs/torchx/APP"
    context = {"body": f'<span class="pre">--max_retries</span> <span class="pre">{path}</span>'}
    load_conf().mark_short_words(context)
    assert context["body"] == f'<span class="pre short">--max_retries</span> <span class="pre">{path}</span>'


def test_pages_without_a_body_stay_as_they_are():
    context = {}
    load_conf().mark_short_words(context)
    assert not context.get("body")


def test_links_to_files_beside_docs_lead_to_the_pages_that_include_them():
    conf = load_conf()
    text = "[a](../SECURITY.md#tokens), [b](../examples/pipeline.py), [c](ssh.md#hosts)"
    assert conf.link_to_pages(text) == "[a](security.md#tokens), [b](../examples/pipeline.py), [c](ssh.md#hosts)"
    for file, page in conf.INCLUDED.items():
        assert f"{{include}} {file}\n" in (doc_pages.ROOT / "docs" / page).read_text()
