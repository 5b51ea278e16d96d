"""Sampling on the device: from rows of logits to the tokens that the core would draw."""
