"""Outputs of a run: checked before any work, written completely or not at all."""
