"""Decode chunks on the device."""
