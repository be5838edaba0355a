"""Corrections of intensity: illumination of tiles, attenuation along depth, bias fields; on host or device."""
