"""Planning of reads and of resampling: samples and arrays → frozen records. Pure.

A crop is its `aabb` in voxels of an array: ``Sample.aabb`` → ``Crop.aabb`` of each part (`alignment`, called by
`samples`). The voxels that are read are a `region`: ``CropRead.region`` (`samples` for direct crops, `reach` for staged
ones), of which `needed` may select boxes.
"""
