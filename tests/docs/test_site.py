"""If this fails, the documentation site does not build without warnings, or its API pages leave a public name out.

`make docs` builds the site; this looks, in milliseconds, at what would make it fail."""

import importlib
import inspect
import re

import pytest

import linumpy
from tests.support.pages import DOCS, ROOT, load_site

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not installed with the package")
site, commands = (load_site(name) if DOCS.exists() else None for name in ("links", "commands"))
#: Packages that users do not import.
INTERNAL = ("linumpy.testing", "linumpy.benchmark", "linumpy.cli", "linumpy.demo", "linumpy.demo_brain")


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


def public():
    """What packages export, and functions and classes whose docstrings have NumPy's sections, as public ones do."""
    for path in sorted((ROOT / "linumpy").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.startswith(INTERNAL):
            continue
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:  # of MONAI, nnU-Net or Warp, whose classes it derives
            if str(error.name).startswith("linumpy"):
                raise
            continue
        if path.name == "__init__.py":
            yield from (getattr(loaded, name) for name in getattr(loaded, "__all__", ()))
        for name, member in vars(loaded).items():
            is_own = getattr(member, "__module__", None) == module and not name.startswith("_")
            has_sections = re.search(r"^ {4}(Parameters|Attributes|Returns)\n", member.__doc__ or "", re.M)
            if is_own and has_sections and (inspect.isfunction(member) or inspect.isclass(member)):
                yield member


def test_api_pages_name_all_that_is_public():
    names = documented()
    assert len(names) == len(set(names))
    objects = {id(found(name)) for name in names}
    members = [member for member in public() if not inspect.ismodule(member) and member != linumpy.__version__]
    assert len(members) > 120
    assert [member for member in members if id(member) not in objects] == []


def test_pages_of_commands_say_what_their_help_says():
    pages = commands.pages()
    assert len(pages) > 20
    for command in commands.commands():
        parser, page = command.parser(), pages[f"commands/{command.name}.md"]
        shown = re.sub(r"\\(.)", r"\1", re.sub(r"^```.*", "", page, flags=re.M)).replace("`", "")
        for action in parser._actions:
            if action.dest in ("help", "version"):
                continue
            text = parser._get_formatter()._expand_help(action)
            assert all(f"`{name}`" in page for name in action.option_strings), command.name
            assert " ".join(text.split()).partition(" [")[0].replace("`", "") in shown, (command.name, action.dest)
        named = re.findall(r"(?<=`)--?[\w-]+(?=`)", "".join(re.findall(r"^\| (`-.*?) \|", page, re.M)))
        assert set(named) == parser._option_string_actions.keys() - {"-h", "--help", "--version"}, command.name
        described = parser.description.split("For example:")[0].replace("`", "").split()
        assert " ".join(described) in " ".join(shown.split()), command.name


def test_the_page_of_environment_variables_names_all():
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "linumpy").rglob("*.py"), *(ROOT / "linumpy/core/src").glob("*.cpp"), ROOT / "CMakeLists.txt"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    used = set(re.findall(r"[\"{](LINUMPY_[A-Z_]+)[\"}]", text)) - {"LINUMPY_CORE_SANITIZE", "LINUMPY_CORE_TESTS"}
    assert set(re.findall(r"^\| `(LINUMPY_\w+)`", page, re.M)) == used | {"LINUMPY_NATIVE"}
