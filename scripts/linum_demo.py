"""Demonstrate linumpy on a synthetic OCT mosaic with a known surface.

Makes the mosaic, writes it as OME-Zarr, reads it (with a GPU: into GPU memory), resamples it to isotropic voxels, finds
the surface of the tissue, and writes the resampled volume, the depth map and two pictures. Then prints the error of
the surface, and the duration of each stage.

With --pipeline the command makes a synthetic brain instead: several slices of overlapping tiles, with the faults of a
microscope. It takes the brain through all stages of linum-pipeline, and prints the error of each stage against the
truth, beside that of doing nothing. The brain and the strengths of all faults are drawn by --seed: the tissue fills the
slices of seeds 0, 3, 6 and so on, lies in agarose in those of 1, 4, 7, and lacks a slice and has strong faults in those
of 2, 5, 8.

For example:
  linum-demo
  linum-demo --pipeline
  linum-demo --pipeline --seed 7
  linum-demo --out demo --size medium --device cuda
"""

from collections.abc import Callable

from linumpy import cli
from linumpy.testing.synthetic import SIZES


def _demo(arguments: cli.Namespace) -> None:
    from linumpy.core import native
    from linumpy.demo import run_demo
    from linumpy.demo_brain import run_brain_demo

    demonstrate: Callable[..., object] = run_brain_demo if arguments.pipeline else run_demo
    options = {} if arguments.seed is None else {"seed": arguments.seed}
    if options and not arguments.pipeline:
        raise ValueError("--seed is of --pipeline: the mosaic of the other demonstration is always the same")
    print(demonstrate(arguments.out, arguments.size, arguments.device, overwrite=arguments.overwrite, **options))
    if why := native.why_no_core():
        print(f"note       zarr-python read, slowly: {why}")


_SIZES = ", ".join(f"{name}: {spec.nbytes / 2**20:,.0f} MiB" for name, spec in SIZES.items())
main = cli.Command(
    "linum-demo", __doc__, _demo,
    cli.Option("--out", metavar="DIR", default="linum-demo", help="Folder for the results. [%(default)s]"),
    cli.Option(
        "--pipeline", action="store_true",
        help="Take a brain of 54 MiB, 0.9 GiB or 49 GiB through all stages of linum-pipeline.",
    ),
    cli.Option("--size", choices=SIZES, default="small", help=f"{_SIZES}. [%(default)s]"),
    cli.Option(
        "--seed", type=int, metavar="N", help="Seed of the brain, with --pipeline. [4: tissue within agarose]"
    ),
    *cli.shared("device", "overwrite"),
)  # fmt: skip
