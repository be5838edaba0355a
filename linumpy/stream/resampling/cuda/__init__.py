"""CUDA sources of the streaming pipeline, as package data."""
