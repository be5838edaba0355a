"""Take the mosaic grids of a brain to one volume, all stages, here or on a dask cluster.

RUN is a TOML, YAML or JSON file. It names the folder of the mosaic grids, one for each slice, and the folder of the
results, and has a table of options for each stage that does not use the defaults:

  mosaics = "mosaics"          # slice_z00.ome.zarr, slice_z01.ome.zarr and so on, from the top down
  output = "results"           # one folder for each stage
  shifts = "shifts_xy.csv"     # as linum-stack-slices-motor reads it
  slice_config = "slices.csv"  # columns slice_id and use: which slices are used
  tile_shape = [512, 512]      # for mosaics without a tile shape in their metadata
  slicing_interval_mm = 0.2
  skip = ["surface"]
  [resample]
  new_spacing = 10

Relative paths begin at the folder of RUN. The same command continues a stopped run; after a change of an option or an
input only the tasks that depend on it are repeated. Slices without a recorded tile are left out. Mosaics and tables are
checked before the first stage.

For example:
  linum-pipeline run.toml
  linum-pipeline run.yaml --device cuda
  linum-pipeline run.toml --cluster tcp://scheduler:8786
"""

from contextlib import nullcontext
from pathlib import Path

from linumpy import cli


def _run(parsed: cli.Namespace) -> None:
    from linumpy.pipeline.runner import run_pipeline
    from linumpy.pipeline.settings import read_run
    from linumpy.warm_up import warming_up

    run, (device, name) = read_run(parsed.run), cli.device_and_name(parsed)
    with warming_up(run) if name == "GPU" else nullcontext():
        summary = run_pipeline(
            run, device=device, overwrite=parsed.overwrite, distributed=parsed.distributed,
            progress=cli.say,
        )  # fmt: skip
    cli.say(summary, f"results in {run.output}")


main = cli.Command(
    "linum-pipeline", __doc__, _run,
    cli.Option("run", type=Path, metavar="RUN", help="The run: a TOML, YAML or JSON file."),
    *cli.shared(*cli.TILES),
)  # fmt: skip
