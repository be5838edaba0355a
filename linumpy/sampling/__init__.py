"""Random samples of volumes: millions of (coordinate, value) pairs a millisecond."""
