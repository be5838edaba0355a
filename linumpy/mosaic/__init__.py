"""Mosaics of tissue from disk to disk: a module for each step that users call; what the steps share is in ``io``."""
