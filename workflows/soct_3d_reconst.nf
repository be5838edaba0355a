#!/usr/bin/env nextflow
// Serial OCT slices to a volume. Check the mosaics and tables. For each mosaic grid: correct the galvo shift, resample,
// correct focal curvature and illumination, find the positions of the tiles, stitch them, compensate attenuation
// with one beam for all slices. Then register and stack all slices, and write a report.
//
//   nextflow run workflows/soct_3d_reconst.nf --input mosaics --shifts shifts_xy.csv --slicing_interval_mm 0.2 \
//       --resolution 10 --tile_shape '512 512' --output results
//
// Parameters and their defaults are in nextflow.config, and explained in README.md.

nextflow.enable.dsl = 2

// An option of a command, left out where the parameter is null.
def option(flag, value) {
    value == null ? '' : "--${flag} ${value}"
}

process check_slices {
    publishDir "${params.output}/check", mode: 'copy'

    input:
    path(folders, stageAs: 'mosaics/*')
    path(shifts)
    path(slice_config)

    output:
    path("slices.txt"), emit: slices

    script:
    """
    linum-check-slices mosaics --shifts ${shifts} ${option('slice-config', slice_config ?: null)} ${option('tile-shape', params.tile_shape)} --list slices.txt
    """
}

process fix_galvo_shift {
    tag "${name}"
    publishDir "${params.output}/galvo", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${name}_galvo.ome.zarr"), emit: mosaic

    script:
    """
    linum-fix-galvo-shift ${mosaic} ${name}_galvo.ome.zarr ${option('tile-shape', params.tile_shape)} --device ${params.device}
    """
}

process resample_mosaic_grid {
    tag "${name}"
    publishDir "${params.output}/resampled", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${name}_resampled.ome.zarr"), emit: mosaic

    script:
    """
    linum-resample-mosaic-grid ${mosaic} ${name}_resampled.ome.zarr --resolution ${params.resolution} ${option('tile-shape', params.tile_shape)} --levels ${params.levels} --device ${params.device}
    """
}

process fix_focal_curvature {
    tag "${name}"
    publishDir "${params.output}/flat", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${name}_flat.ome.zarr"), emit: mosaic
    path("${name}_focal.png"), emit: picture
    path("${name}_focal.json"), emit: fit

    script:
    """
    linum-detect-focal-curvature ${mosaic} ${name}_flat.ome.zarr --report ${name}_focal.png --interpolate --s-xy ${params.s_xy} --s-z ${params.s_z} --levels ${params.levels} --device ${params.device}
    """
}

process estimate_illumination {
    publishDir "${params.output}/shading", mode: 'copy'

    input:
    path(mosaics, stageAs: 'mosaics/*')

    output:
    path("brain.npz"), emit: fields
    path("brain.json"), emit: numbers
    path("brain.png"), emit: picture

    script:
    """
    linum-estimate-illumination mosaics/*.ome.zarr brain.npz --report brain.png --device ${params.device}
    """
}

process fix_illumination {
    tag "${name}"
    publishDir "${params.output}/even", mode: 'copy'

    input:
    tuple val(name), path(mosaic)
    path(fields)

    output:
    tuple val(name), path("${name}_even.ome.zarr"), emit: mosaic

    script:
    """
    linum-fix-illumination ${mosaic} ${name}_even.ome.zarr --fields ${fields} --levels ${params.levels} --device ${params.device}
    """
}

process find_tissue_interface {
    tag "${name}"
    publishDir "${params.output}/surface", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${name}_surface.ome.zarr"), emit: surface
    path("${name}_surface.png"), emit: picture

    script:
    """
    linum-find-tissue-interface ${mosaic} ${name}_surface.ome.zarr --overlay ${name}_surface.png --s-xy ${params.s_xy} --s-z ${params.s_z} --device ${params.device}
    """
}

process aip {
    tag "${name}"
    publishDir "${params.output}/aip", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${name}_aip.ome.zarr"), emit: projection

    script:
    """
    linum-aip ${mosaic} ${name}_aip.ome.zarr --device ${params.device}
    """
}

process estimate_transform {
    tag "${name}"
    publishDir "${params.output}/positions", mode: 'copy'

    input:
    tuple val(name), path(mosaic)

    output:
    tuple val(name), path("${mosaic}"), path("${name}_positions.json"), emit: located
    path("${name}_positions.json"), emit: positions

    script:
    """
    linum-estimate-transform ${mosaic} ${name}_positions.json --overlap ${params.overlap} --device ${params.device}
    """
}

process stitch_3d {
    tag "${name}"
    publishDir "${params.output}/stitched", mode: 'copy'

    input:
    tuple val(name), path(mosaic), path(positions)

    output:
    tuple val(name), path("${name}_stitched.ome.zarr"), emit: volume
    path("${name}_stitched.ome.zarr"), emit: slice

    script:
    """
    linum-stitch-3d ${mosaic} ${positions} ${name}_stitched.ome.zarr --levels ${params.levels} --device ${params.device}
    """
}

process estimate_beam {
    publishDir "${params.output}/beam", mode: 'copy'

    input:
    path(slices, stageAs: 'slices/*')

    output:
    path("brain.json"), emit: beam

    script:
    """
    linum-estimate-beam slices brain.json --slicing-interval-mm ${params.slicing_interval_mm} --device ${params.device}
    """
}

process compensate_attenuation {
    tag "${name}"
    publishDir "${params.output}/compensated", mode: 'copy'

    input:
    tuple val(name), path(volume)
    path(beam)

    output:
    path("${name}_compensated.ome.zarr"), emit: slice
    path("${name}_compensated.json"), emit: gains

    script:
    """
    linum-compensate-attenuation ${volume} ${name}_compensated.ome.zarr --beam ${beam} --json ${name}_compensated.json --levels ${params.levels} --device ${params.device}
    """
}

process register_slices {
    publishDir "${params.output}/stack", mode: 'copy'

    input:
    path(slices, stageAs: 'slices/*')
    path(shifts)

    output:
    path("transforms.json"), emit: transforms

    script:
    """
    linum-register-pairwise slices transforms.json --shifts ${shifts} --slicing-interval-mm ${params.slicing_interval_mm} --device ${params.device}
    """
}

process stack {
    publishDir "${params.output}/stack", mode: 'copy'

    input:
    path(slices, stageAs: 'slices/*')
    path(transforms)

    output:
    path("stack.ome.zarr"), emit: volume

    script:
    """
    linum-stack-slices slices ${transforms} stack.ome.zarr --levels ${params.levels} --device ${params.device}
    """
}

process report {
    publishDir "${params.output}/report", mode: 'copy'

    input:
    path(slices, stageAs: 'results/compensated/*')
    path(positions, stageAs: 'results/positions/*')
    path(pictures, stageAs: 'results/shading/*')
    path(numbers, stageAs: 'results/shading/*')
    path(surfaces, stageAs: 'results/surface/*')
    path(volume, stageAs: 'results/stack/*')
    path(transforms, stageAs: 'results/register/*')
    path(beam, stageAs: 'results/beam/*')
    path(gains, stageAs: 'results/compensated/*')

    output:
    path("report.html"), emit: page

    script:
    """
    linum-report results report.html --follow-links --device ${params.device}
    """
}

workflow {
    if (params.input == null || params.shifts == null || params.slicing_interval_mm == null) {
        error "--input (a folder of mosaics, *.ome.zarr), --shifts (a CSV table) and --slicing_interval_mm are needed"
    }
    mosaics = Channel.fromPath("${params.input}/*.ome.zarr", type: 'dir', checkIfExists: true).map { mosaic -> tuple(mosaic.name.replace('.ome.zarr', ''), mosaic) }
    folders = mosaics.map { slice -> slice[1] }
    shifts = file(params.shifts, checkIfExists: true)
    slice_config = params.slice_config == null ? [] : file(params.slice_config, checkIfExists: true)

    // Every other process waits for the check, which lists the slices that are used.
    check_slices(folders.collect(), shifts, slice_config)
    used = mosaics.join(check_slices.out.slices.splitText().map { line -> tuple(line.trim()) })
    if (params.skip_galvo) {
        straight = used
    } else {
        fix_galvo_shift(used)
        straight = fix_galvo_shift.out.mosaic
    }
    resample_mosaic_grid(straight)
    if (params.skip_focal) {
        flat = resample_mosaic_grid.out.mosaic
    } else {
        fix_focal_curvature(resample_mosaic_grid.out.mosaic)
        flat = fix_focal_curvature.out.mosaic
    }
    if (params.skip_illumination) {
        even = flat
        pictures = Channel.empty()
        numbers = Channel.empty()
    } else {
        all_flat = flat.map { slice -> slice[1] }
        estimate_illumination(all_flat.collect())
        fix_illumination(flat, estimate_illumination.out.fields)
        even = fix_illumination.out.mosaic
        pictures = estimate_illumination.out.picture
        numbers = estimate_illumination.out.numbers
    }
    find_tissue_interface(even)
    aip(even)
    estimate_transform(even)
    stitch_3d(estimate_transform.out.located)
    estimate_beam(stitch_3d.out.slice.collect())
    compensate_attenuation(stitch_3d.out.volume, estimate_beam.out.beam)
    register_slices(compensate_attenuation.out.slice.collect(), shifts)
    stack(compensate_attenuation.out.slice.collect(), register_slices.out.transforms)
    report(compensate_attenuation.out.slice.collect(), estimate_transform.out.positions.collect(), pictures.collect().ifEmpty([]), numbers.collect().ifEmpty([]), find_tissue_interface.out.picture.collect(), stack.out.volume, register_slices.out.transforms, estimate_beam.out.beam, compensate_attenuation.out.gains.collect())
}
