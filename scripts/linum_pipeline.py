#!/usr/bin/env python3
"""Take the mosaic grids of a brain to one volume, all stages, here or on a dask cluster.

RUN is a file of TOML, YAML or JSON that says where the mosaic grids are, one for each slice, and where the results go,
with a table for each stage whose options are not the default ones:

  mosaics = "mosaics"          # slice_z00.ome.zarr, slice_z01.ome.zarr and so on, from the top down
  output = "results"           # one folder for each stage
  shifts = "shifts.csv"        # as linum-stack-slices-motor reads it
  slicing_interval_mm = 0.2
  skip = ["surface"]
  [resample]
  new_spacing = 10

Relative paths begin at the folder of RUN. A run that was stopped goes on when it is started again; after a change of an
option or of an input only what depends on it is made anew. Slices of which nothing was recorded are left out.

For example:
  linum-pipeline run.toml
  linum-pipeline run.yaml --use_gpu
  linum-pipeline run.toml --cluster tcp://scheduler:8786
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="What to do: TOML, YAML or JSON.")
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _run(parsed: argparse.Namespace) -> None:
    from linumpy.pipeline.runner import run_pipeline
    from linumpy.pipeline.settings import read_run

    run, use_gpu = read_run(parsed.run), cli.choose_device(parsed)
    summary = run_pipeline(
        run, use_gpu=use_gpu, overwrite=parsed.overwrite, distributed=parsed.distributed,
        progress=lambda line: print(line, flush=True),
    )  # fmt: skip
    print(summary)
    print(f"results in {run.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
