"""The tissue surface, shapes fitted to it, and focal curvature."""
