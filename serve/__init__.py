"""Checkpoint -> Server, for the length of a `with` block."""
