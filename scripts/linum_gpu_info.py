"""Print the GPU, its memory and driver, the GPU packages, and the path of files to the GPU.

For example:
  linum-gpu-info
  linum-gpu-info --path /data/mosaics
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from linumpy import cli, device
from linumpy.core import native


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-gpu-info", description=__doc__)
    parser.add_argument(
        "--path", metavar="DIR", help="Print the path of bytes from this folder to the GPU, and the reasons."
    )
    return parser


def _print(arguments: argparse.Namespace) -> None:
    if arguments.path is not None and not os.path.exists(arguments.path):
        raise FileNotFoundError(f"--path {arguments.path}: there is no such folder")
    print(device.describe())
    why = native.why_no_core()
    print(f"{'core':<12}{'native: reads run outside Python' if why is None else f'none: {why}; zarr-python reads'}")
    if why is None:
        library = native.library()
        for name, decoder in native.DECODERS.items():
            print(f"{decoder.codecs:<12}{library.opened.get(name) or library.missing[name]}")
    if arguments.path is None:
        return
    from linumpy.gds import gds_verdict

    verdict = gds_verdict(arguments.path)
    kind = "native GPUDirect Storage" if verdict.is_native else "not GPUDirect Storage"
    print(f"\n{'folder':<12}{arguments.path}\n{'path':<12}{verdict.path}: {kind}")
    for number, reason in enumerate(verdict.reasons):
        print(f"{'' if number else 'why':<12}{reason}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _print, arguments)


if __name__ == "__main__":
    sys.exit(main())
