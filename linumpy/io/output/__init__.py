"""Outputs of a run: checked before any work, complete or not at all."""
