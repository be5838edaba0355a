"""``python -m benchmarks.brains``: errors on many synthetic brains, beside doing nothing and peers.

In: seeds and kinds of :func:`linumpy.testing.brain_spec.draw_brain`. Out: a Markdown table with the median and the
worst error of each stage over the seeds, with the stage, without it, and by each installed peer; and all errors as
JSON. A brain that is worth a look is made again, with its results and its report, by its seed and ``--keep``. A brain
whose pipeline fails is counted, and its error is in the JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.brain_peers import PEERS
from linumpy.arrays import DeviceName
from linumpy.demo_brain import run_of
from linumpy.io.output.files import replacing
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import OPTIONS, Run
from linumpy.pipeline.stages import STAGES, Task
from linumpy.resample.tile_work import TileWork
from linumpy.testing.brain_errors import StageError, errors_of, motor_matrix, nominal_positions
from linumpy.testing.brain_files import write_brain
from linumpy.testing.brain_spec import BrainSpec, draw_brain

#: Stages that are left out, or replaced by doing nothing, to measure what a stage does for the stack.
WITHOUT: dict[str, tuple[str, ...]] = {
    "focal": ("focal",),
    "illumination": ("shading", "illumination"),
    "positions": ("positions",),
    "attenuation": ("beam", "attenuation"),
    "register": ("register",),
}
WITHOUT["all of these"] = tuple(itertools.chain.from_iterable(WITHOUT.values()))


@dataclass(frozen=True)
class Request:
    """A brain to measure: its seed and kind, and how."""

    seed: int
    kind: str
    scale: float = 1.0
    device: DeviceName = "cpu"
    keep: Path | None = None
    peers: tuple[str, ...] = tuple(PEERS)


def measure(request: Request) -> dict[str, Any]:
    """Make a brain, run the pipeline with and without each stage, and return all errors as values of JSON."""
    spec = draw_brain(request.seed, request.kind, request.scale)
    found: dict[str, Any] = {"seed": request.seed, "kind": request.kind, "anatomy": spec.anatomy, "errors": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if request.keep is not None:
            folder = request.keep / f"{request.kind}_{request.seed}"
            folder.mkdir(parents=True, exist_ok=True)
        try:
            found["errors"] = [asdict(error) for error in _errors(spec, folder, request)]
            found["peers"] = [
                {"peer": peer, **asdict(error)}
                for peer in request.peers
                for error in PEERS[peer](spec, folder / "results")
            ]
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"
            found["traceback"] = traceback.format_exc()
    return found


def _errors(spec: BrainSpec, folder: Path, request: Request) -> list[StageError]:
    """Run the pipeline with all stages, and without each; return the errors of the stages, and of the stacks."""
    write_brain(spec, folder / "brain", device=request.device, overwrite=True)
    run = replace(run_of(spec, folder), skip=("aip",) if request.keep else ("aip", "report"))
    run_pipeline(run, device=request.device, overwrite=True)
    errors = list(errors_of(spec, folder / "results"))
    (stack,) = [error for error in errors if error.stage == "stack"]
    for name in WITHOUT:
        run_without(spec, run, name, folder / "without" / name, device=request.device)
        (nothing,) = errors_of(spec, folder / "without" / name, ("stack",))
        errors.append(replace(stack, what=f"{stack.what}; without {name}", nothing=nothing.value))
    return errors


def run_without(spec: BrainSpec, run: Run, name: str, output: Path, *, device: DeviceName = "cpu") -> None:
    """Repeat the end of a finished run without one of :data:`WITHOUT`.

    Positions and transforms, which later stages need, are replaced by nominal positions and by the motor's transforms.
    """
    order, touched = list(OPTIONS), WITHOUT[name]
    left_out = [stage for stage in touched if stage in OPTIONS and stage not in ("positions", "register")]
    # The pipeline takes mosaic grids, so the end of a run begins with their stitching at the latest.
    start = min(order.index(stage) for stage in (*touched, "stitch") if stage in OPTIONS)
    while _lacks_roles([stage for stage in order[start:] if stage not in (*run.skip, *left_out)]):
        start -= 1
    images = [stage for stage in order[:start] if "image" in STAGES[stage].makes and (run.output / stage).is_dir()]
    skip = dict.fromkeys((*run.skip, "aip", "surface", "report", *order[:start], *left_out))
    output.parent.mkdir(exist_ok=True)
    with _doing_nothing(spec, run.output, [stage for stage in touched if stage in ("positions", "register")]):
        tail = replace(run, mosaics=run.output / images[-1], output=output, skip=tuple(skip))
        run_pipeline(tail, device=device, overwrite=True)


def _lacks_roles(stages: Sequence[str]) -> bool:
    """Return whether stages need files of earlier ones, besides images."""
    made = {role for stage in stages for role in STAGES[stage].makes}
    return any(role not in made | {"image"} for stage in stages for role in STAGES[stage].needs)


@contextmanager
def _doing_nothing(spec: BrainSpec, results: Path, stages: Sequence[str]) -> Iterator[None]:
    """Replace stages by ones that change the results of a finished run to nominal positions and the motor's shifts."""

    def positions(task: Task, work: TileWork) -> None:
        content = json.loads((results / "positions" / task.outputs["positions"].name).read_text())
        nominal = nominal_positions(spec) / content["spacing_um"]
        for tile in content["tiles"]:
            tile["y"], tile["x"] = map(float, nominal[tile["row"], tile["column"]])
        _write(task.outputs["positions"], content)

    def register(task: Task, work: TileWork) -> None:
        content = json.loads((results / "register" / "transforms.json").read_text())
        first = content["slices"][0]["number"]
        for part in content["slices"]:
            matrix = np.array(part["matrix"])
            matrix[1:, 1:] = motor_matrix(spec, part["number"], first)
            part["matrix"] = matrix.tolist()
        _write(task.outputs["transforms"], content)

    before = dict(STAGES)
    calls = {"positions": positions, "register": register}
    STAGES.update({stage: replace(STAGES[stage], call=calls[stage]) for stage in stages})
    try:
        yield
    finally:
        STAGES.update(before)


def _write(path: Path, content: object) -> None:
    with replacing(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(content))


def table(brains: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table: a row for each kind, stage and quantity; median and worst, and the worst's seed."""
    peers = list(dict.fromkeys(error["peer"] for brain in brains for error in brain.get("peers", ())))
    heads = ["kind", "stage", "quantity", "with", "worst", "seed", "without", "worst", "better in", *peers]
    lines = [heads, ["---"] * len(heads)]
    rows: dict[tuple[str, str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    by_peer: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for brain in brains:
        for error in brain["errors"]:
            # The quantity may tell the truth of a brain: "attenuation left, of 2.1, worst slice".
            key = brain["kind"], error["stage"], _without_numbers(error["what"])
            rows[key].append((brain["seed"], error))
        for error in brain.get("peers", ()):
            by_peer[brain["kind"], error["stage"], error["what"], error["peer"]].append(error["value"])
    for (kind, stage, what), found in rows.items():
        unit = found[0][1]["unit"]
        values, nothing = _spread(found, "value"), _spread(found, "nothing")
        seed = max(found, key=lambda part: _off(part[1], "value"))[0]
        compared = [error for _, error in found if error["nothing"] is not None]
        better = sum(_off(error, "value") <= _off(error, "nothing") for error in compared)
        told = [_of_peer(by_peer.get((kind, stage, what, peer))) for peer in peers]
        wins = f"{better} of {len(compared)}" if compared else ""
        quantity = f"{what}, {unit}".removesuffix(", ")
        lines.append([kind, stage, quantity, *values, str(seed), *nothing, wins, *told])
    failed = [f"- {b['kind']}, seed {b['seed']}: {b['failed']}" for b in brains if "failed" in b]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + (f"\n\nFailed, {len(failed)} of {len(brains)}:\n" + "\n".join(failed) if failed else "")


def _without_numbers(what: str) -> str:
    return ", ".join(part for part in what.split(", ") if not part.startswith("of "))


def _off(error: dict[str, Any], key: str) -> float:
    return float(abs(error[key] - error["best"]))


def _spread(found: Sequence[tuple[int, dict[str, Any]]], key: str) -> tuple[str, str]:
    """Return the median and the worst value, of those that are known."""
    known = [error for _, error in found if error[key] is not None]
    if not known:
        return "", ""
    return f"{median(error[key] for error in known):.3g}", f"{max(known, key=lambda error: _off(error, key))[key]:.3g}"


def _of_peer(values: Sequence[float] | None) -> str:
    return f"{median(values):.3g} (worst {max(values):.3g})" if values else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the brains; return 1 if a pipeline failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brains", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--kinds", nargs="+", default=["full", "partial", "severe"])
    parser.add_argument("--scale", type=float, default=1.0, help="size of tiles; 1 for 40 x 64 x 64 [%(default)s]")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[%(default)s]")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep brains and results, with reports")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all errors")
    args = parser.parse_args(argv)
    requests = [
        Request(seed, kind, args.scale, args.device, args.keep, tuple(args.peers))
        for kind in args.kinds
        for seed in args.seeds
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes, which are many
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    brains = []
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for brain in pool.map(measure, requests):
            brains.append(brain)
            print(f"{brain['kind']} {brain['seed']}: {brain.get('failed', 'done')}", file=sys.stderr, flush=True)
            if args.json is not None:  # what is done stays if the next one never ends
                args.json.write_text(json.dumps({"scale": args.scale, "brains": brains}, indent=1))
    print(table(brains))
    return int(any("failed" in brain for brain in brains))


if __name__ == "__main__":
    sys.exit(main())
