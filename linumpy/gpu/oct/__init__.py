"""Kernels for optical coherence tomography: surfaces, shifts, projections, correlations."""
