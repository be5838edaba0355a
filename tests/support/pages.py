"""The documentation's pages, as files of the repository; the module that runs their snippets."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def load_site(name):
    """Import a module of docs/site, which builds the pages."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"site/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pages():
    """All pages whose snippets are run; none where the package was installed without them."""
    if not DOCS.exists():
        return []
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
