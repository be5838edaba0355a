"""If this fails, a record of many fields can be built by position, where two swapped numbers are silent."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "linumpy"
PACKAGES = ("geometry", "correction", "registration", "mosaic", "quality", "pipeline")
#: Records of the registration of slices, which still are built by position in places.
BY_POSITION = {
    "Alignment", "ChainSolution", "CoarseMatches", "Level", "NormalEquations", "PairLink", "PairResult",
    "PairTransforms", "SliceTransform", "SliceTransforms", "ZSearch",
}  # fmt: skip


def records(package):
    """The dataclasses of a package: name, number of fields that may be passed by position, and decorator."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                decorators = [ast.unparse(one) for one in node.decorator_list]
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                names = [ast.unparse(one.annotation) for one in fields]
                count = names.index("KW_ONLY") if "KW_ONLY" in names else len(names)
                for decorator in decorators:
                    if decorator.startswith("dataclass"):
                        yield node.name, count, decorator


@pytest.mark.parametrize("package", PACKAGES)
def test_records_of_more_than_three_fields_are_built_by_keyword(package):
    found = list(records(package))
    assert found
    by_position = {name for name, count, decorator in found if count > 3 and "kw_only=True" not in decorator}
    assert by_position <= BY_POSITION
