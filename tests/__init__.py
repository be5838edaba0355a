"""Tests, laid out as the package; what they share is in ``tests.support``."""
