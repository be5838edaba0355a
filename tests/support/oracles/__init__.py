"""Slow, obvious references."""
