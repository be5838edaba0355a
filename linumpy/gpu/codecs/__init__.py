"""Decode and encode chunks on the device."""
