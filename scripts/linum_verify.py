"""Verify that an OME-Zarr image, or any other Zarr group or array, is whole and says what it holds.

Every chunk of every level and label is read and decoded; levels are compared with the finer level of which they were
made; the metadata are compared with NGFF 0.1 to 0.6, and with what is stored. A line for each array is printed, then
what was found, the most harmful first: where it is, what it means, and what to do. Nothing is written, unless --write
is given, and voxels never are.

Exit code: 0 if the image is sound, 1 if something was found, 2 if it cannot be read.

For example:
  linum-verify brain.ome.zarr
  linum-verify brain.ome.zarr --thorough --html verified.html
  linum-verify https://example.org/brain.ome.zarr --journal verified.jsonl
  linum-verify brain.ome.zarr --repair --unit micrometer
  linum-verify brain.ome.zarr --repair --unit micrometer --write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from linumpy import cli

if TYPE_CHECKING:
    from linumpy.verification.findings import Verification


def _verify(parsed: cli.Namespace) -> int:
    from linumpy.io.output.checks import check_apart
    from linumpy.io.output.files import check_file
    from linumpy.verification.findings import Verification
    from linumpy.verification.page import write_page
    from linumpy.verification.repair import plan_repairs
    from linumpy.verification.verify import verify

    # All that can be refused is refused before the source is read, which may take hours.
    if not parsed.repair and (parsed.write or parsed.unit is not None):
        raise ValueError("--write and --unit are options of --repair: add --repair")
    check_apart([path for path in (parsed.page, parsed.journal) if path is not None], [parsed.source])
    if parsed.page is not None:
        check_file(parsed.page, overwrite=parsed.overwrite)
    if parsed.journal is not None:
        check_file(parsed.journal, overwrite=True)
    if parsed.repair:
        plan_repairs(parsed.source, Verification(str(parsed.source), (), ()), parsed.unit)
    result = verify(
        parsed.source, thorough=parsed.thorough, device=parsed.device, journal=parsed.journal,
        distributed=parsed.distributed,
    )  # fmt: skip
    print(json.dumps(result.as_json(), indent=2) if parsed.json else result)
    if parsed.page is not None:
        write_page(result, parsed.source, parsed.page, overwrite=parsed.overwrite)
    if parsed.repair:
        _repair(parsed, result)
    return 0 if result.sound else 1


def _repair(parsed: cli.Namespace, result: Verification) -> None:
    """Show how metadata can be repaired, and repair them with ``--write``; on stderr where stdout has JSON."""
    from linumpy.verification.repair import apply_repairs, plan_repairs, show_changes

    out = sys.stderr if parsed.json else sys.stdout
    changes = plan_repairs(parsed.source, result, parsed.unit)
    print(show_changes(changes) if changes else "no metadata that can be repaired", file=out)
    if changes and parsed.write:
        kept = apply_repairs(parsed.source, changes)
        print(f"metadata are written; the documents of before are kept: {', '.join(kept) or 'none'}", file=out)
    elif changes:
        print("nothing is written yet: --write writes this", file=out)


main = cli.Command(
    "linum-verify", __doc__, _verify,
    cli.Option(
        "source", type=cli.path_or_url, metavar="SOURCE",
        help="Image, plate, group or array: a folder, a ZIP file, or a URL.",
    ),
    cli.Option(
        "--thorough", action="store_true",
        help="Compare all voxels of levels, not one of 4 along each axis: finds single voxels that have changed, and "
        "takes up to twice the time.",
    ),
    cli.Option("--json", action="store_true", help="Print the result as JSON."),
    cli.Option("--html", dest="page", type=Path, metavar="PAGE", help="Write the result as an HTML page, with maps."),
    cli.Option(
        "--journal", type=Path, metavar="FILE",
        help="Record what is done in FILE: the same command goes on from there after an interrupt.",
    ),
    cli.Option(
        "--repair", action="store_true",
        help="Show which metadata can be repaired: places of levels, units, versions, types of axes, consolidated "
        "metadata. SOURCE is a local folder.",
    ),
    cli.Option(
        "--write", action="store_true", help="Write what --repair shows; old documents are kept beside the new ones."
    ),
    cli.Option("--unit", metavar="NAME", help="Unit of axes of space without one, for --repair: micrometer."),
    *cli.shared(*cli.TILES),
)  # fmt: skip
