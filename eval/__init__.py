"""Servers -> Measurements -> Report."""
