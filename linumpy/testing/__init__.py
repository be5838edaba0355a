"""Synthetic images with known truth."""
