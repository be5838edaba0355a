"""Readers of files that other programs write: paths → frozen records of NumPy arrays, checked.

OpenVDB and NanoVDB are read here because no package reads them. As of November 2026: openvdb and pyopenvdb have no
release for current Pythons; fvdb-core is a source package that needs torch and CUDA; tinyvdb 0.9 returns no values of
tiles of inner nodes, fails on half precision with Blosc, and reads no NanoVDB voxels; xuvdb needs a compiler at run
time; nanovdb-editor is a viewer; warp-lang reads ``.nvdb`` into volumes that only its own kernels can use; vtk only
writes these files.
"""
