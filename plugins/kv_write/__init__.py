"""Writes a step's K and V into the paged pools, and rotates q and K on the way."""
