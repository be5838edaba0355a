"""The version of this package, for whatever records it; it imports nothing."""

__version__ = "0.1.0"
