"""Mosaics of tissue from disk to disk: a module for each step that users call; ``io`` has what the steps share."""
