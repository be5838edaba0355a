#!/usr/bin/env python3
"""Print how large the code is and what its public modules load, and fail where a size is above its ceiling.

A ceiling is the size of today where that is above the target: lower it when the size falls. A feature pays for its
size; the ceilings were raised once, for linum-verify, which nothing else does. Run in the root of the project.

A statement is an ``ast.stmt`` that is no docstring. A closure has the project's modules that importing a module loads:
imports at the top of modules, with the packages' ``__init__``, without those under TYPE_CHECKING.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

#: Target and ceiling of each size.
LIMITS = {
    "lines of linumpy and scripts": (57_000, 68_271),
    "statements of linumpy and scripts": (29_500, 35_664),
    "lines of linumpy/benchmark": (700, 0),
    "lines of benchmarks": (4_800, 0),
    "lines of tests": (48_500, 60_545),
    "closure of linumpy.gpu.interpolation": (4_500, 0),
    "closure of linumpy.rays": (4_000, 0),
    "closure of linumpy.gpu.zarr_io": (9_000, 0),
    "closure of linumpy.stream.pipeline": (15_500, 0),
    "closure of linumpy.resample.resample_zarr": (18_500, 0),
    "docs/performance.md": (160, 0),
    "CHANGELOG.md": (60, 0),
    "pyproject.toml": (400, 0),
}
#: Lines of code over statements: lines are not to be saved by denser lines.
LEAST_DENSITY = 1.215


def sources(*folders: str) -> dict[str, Path]:
    """Return the files of folders by the names of their modules."""
    files = [file for folder in folders for file in Path(folder).rglob("*.py")]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def lines(files: dict[str, Path]) -> int:
    """Count the lines of files."""
    return sum(len(file.read_text().splitlines()) for file in files.values())


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is only a text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(tree: ast.AST) -> int:
    """Count the statements of a module that are no docstrings."""
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def lines_with_code(text: str, tree: ast.AST) -> int:
    """Count the lines of a module without blank lines, comments and docstrings."""
    texts = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_docstring(node)}
    space = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in space and not (token.type == tokenize.STRING and token.start[0] in texts):
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used)


def imported(body: list[ast.stmt], package: str) -> set[str]:
    """Return what the statements of a module import when they run, classes and functions aside."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.If):
            found |= imported(([] if "TYPE_CHECKING" in ast.dump(node.test) else node.body) + node.orelse, package)
        elif isinstance(node, (ast.Try, ast.With)):
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            found |= imported(node.body + handlers + getattr(node, "orelse", []), package)
    return found


def closure(name: str, files: dict[str, Path], trees: dict[str, ast.Module]) -> dict[str, Path]:
    """Return the files of all modules that importing a module loads."""
    seen: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in files and one not in seen:
            seen[one] = files[one]
            package = one if files[one].name == "__init__.py" else one.rpartition(".")[0]
            parts = one.split(".")
            waiting += [".".join(parts[:k]) for k in range(1, len(parts))]
            for other in imported(trees[one].body, package):
                waiting += [".".join(other.split(".")[:k]) for k in range(1, other.count(".") + 2)]
    return seen


def main() -> int:
    """Print all sizes; return 1 if one is above its ceiling."""
    files = sources("linumpy", "scripts")
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    total = sum(map(statements, trees.values()))
    density = sum(lines_with_code(file.read_text(), trees[name]) for name, file in files.items()) / total
    failed = 0
    for what, (target, ceiling) in LIMITS.items():
        kind, _, name = what.partition(" of ")
        if kind == "closure":
            size = lines(closure(name, files, trees))
        elif kind == "lines":
            size = lines(sources(*name.split(" and ")))
        else:
            size = total if kind == "statements" else len(Path(what).read_text().splitlines())
        most = max(target, ceiling)
        failed += size > most
        mark = "  <-- above" if size > most else f"  <-- lower its ceiling of {most:,}" if target < size < most else ""
        print(f"{size:7,} of {target:6,}  {what}{mark}")
    failed += density < LEAST_DENSITY
    print(f"{density:7.3f} lines of code a statement, at least {LEAST_DENSITY}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
