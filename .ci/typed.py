#!/usr/bin/env python3
"""Check types as users meet them: by mypy and by pyright, in the snippets of README and docs, and in typical mistakes.

The snippets must have no error. In ``tests/mistakes.py`` both must find an error in each line that ends in
``# mistake``, and in no other line. Run in the root of the project.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))
from docs.site.snippets import snippets

FOLDER, MISTAKES = Path("build/typed"), Path("tests/mistakes.py")
#: File and line → messages.
Found = dict[tuple[str, int], list[str]]


def write_pages() -> None:
    """Write the Python snippets of each page into a module, in the lines that they have in the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for earlier in FOLDER.glob("*.py"):  # of a page that has another name now
        earlier.unlink()
    for page in (Path("README.md"), *Path("docs").glob("*.md")):
        lines: list[str] = []
        for snippet in snippets(page):
            if snippet.language == "python":
                lines += [""] * (int(snippet.name.partition(":")[2]) - 1 - len(lines)) + snippet.code.splitlines()
        (FOLDER / f"{page.stem}.py").write_text("\n".join([*lines, ""]))
    (FOLDER / MISTAKES.name).write_text(MISTAKES.read_text())
    (FOLDER / "pyrightconfig.json").write_text('{"reportMissingImports": false, "reportMissingModuleSource": false}')


def printed_by(*command: str) -> str:
    """Return what a checker prints of the modules; end if it could not check them."""
    done = subprocess.run(
        [sys.executable, "-m", *command, "."], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    if done.returncode > 1:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def by_mypy() -> Found:
    """Return the errors that mypy finds."""
    text = printed_by("mypy", "--ignore-missing-imports", "--check-untyped-defs", "--config-file=")
    found: Found = defaultdict(list)
    for file, line, message in re.findall(r"^(\w+\.py):(\d+): error: (.*)$", text, re.M):
        found[file, int(line)].append(message)
    return found


def by_pyright() -> Found:
    """Return the errors that pyright finds."""
    text = printed_by("pyright", "--outputjson", "--pythonpath", sys.executable)
    found: Found = defaultdict(list)
    for entry in json.loads(text)["generalDiagnostics"]:
        found[Path(entry["file"]).name, entry["range"]["start"]["line"] + 1].append(entry["message"])
    return found


def main() -> int:
    """Print what a checker finds where it should not, and what it does not find."""
    write_pages()
    expected = {
        (MISTAKES.name, number)
        for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
        if line.endswith("# mistake")
    }
    failed = False
    for name, found in (("mypy", by_mypy()), ("pyright", by_pyright())):
        for file, line in sorted(found.keys() - expected):
            print(f"{name}: {file.replace('.py', '.md')}:{line}: {found[file, line][0]}")
        for file, line in sorted(expected - found.keys()):
            print(f"{name}: {file}:{line}: finds no mistake")
        failed |= found.keys() != expected
        errors, mistakes = len(found.keys() - expected), len(found.keys() & expected)
        print(f"{name}: {errors} errors in snippets, {mistakes} of {len(expected)} mistakes found")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
