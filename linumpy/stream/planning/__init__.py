"""Planning of reads and of resampling: samples and arrays → frozen records. Pure.

An `aabb` is the box of a crop, in voxels of an array: `samples` calls `alignment`, which plans ``Crop.aabb`` of each
part from ``Sample.aabb``. A `region` is the box that is read: `samples` plans ``CropRead.region`` of direct crops, and
`reach` of staged crops, where it may reduce a region to the boxes of chunks that a warped crop needs.
"""
