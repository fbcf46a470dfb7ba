"""Variant -> Checkpoint: everything that happens before a server starts."""
