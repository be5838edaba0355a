"""If this fails, the documentation site does not build without warnings, or its API pages leave a public name out.

`make docs` builds the site; this looks, in milliseconds, at what would make it fail."""

import importlib
import re

import pytest

from tests.support.pages import DOCS, ROOT, load_site

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not installed with the package")
site = load_site("links") if DOCS.exists() else None
#: Modules whose public names are all on API pages.
PUBLIC = ("linumpy", "linumpy.gpu", "linumpy.gpu.interpolation", "linumpy.geometry.interface", "linumpy.rays")
PUBLIC += ("linumpy.sampling", "linumpy.stream", "linumpy.voxel")


def nav():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"[\w/]+\.md", text[text.index("\nnav:") : text.index("\nvalidation:")])


def anchors(path):
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", one).lower() for one in headings]
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


def test_the_navigation_names_each_page_once():
    here = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(site.PAGES)
    assert sorted(nav()) == sorted(here)
    assert all((ROOT / site.source_of(page)).exists() for page in nav())


def test_links_between_pages_lead_somewhere():
    checked = 0
    for page in nav():
        source = site.source_of(page)
        text = re.sub(r"^```.*?^```", "", (ROOT / source).read_text(encoding="utf-8"), flags=re.M | re.S)
        for path, anchor in site.links(text, source):
            if path.startswith("docs/pictures/"):
                continue  # drawn for the site
            assert (ROOT / path).exists(), f"{source} → {path}"
            assert site.page_of(path) is not None, f"{source} → {path}, which is not on the site"
            assert not anchor or anchor in anchors(path), f"{source} → {path}#{anchor}"
            checked += 1
    assert checked > 50


def test_links_of_a_page_on_the_site():
    text = "[a](docs/reader.md#memory) [b](LICENSE) [c](#here) [d](https://x.y/z.md) [e](workflows/README.md)"
    expected = "[a](reader.md#memory) [b](forge/LICENSE) [c](#here) [d](https://x.y/z.md) [e](nextflow.md)"
    assert site.for_site(text, "index.md", lambda path: f"forge/{path}") == expected
    assert site.for_site("[a](../reader.md)", "api/index.md", str) == "[a](../reader.md)"


def documented():
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return re.findall(r"^::: (\S+)$", text, re.M)


def found(name):
    module, _, last = name.rpartition(".")
    module = importlib.import_module(module)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(name)


def test_api_pages_name_what_is_there():
    for name in documented():
        assert found(name).__doc__, name


def test_api_pages_name_all_that_is_public():
    names = documented()
    assert len(names) == len(set(names))
    objects = {id(found(name)) for name in names}
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            assert id(found(f"{module}.{name}")) in objects, f"{module}.{name}"
