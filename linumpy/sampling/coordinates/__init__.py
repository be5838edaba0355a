"""Random coordinates: how they are drawn, and in which order."""
