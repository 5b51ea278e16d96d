"""Rows of hidden states picked out of a packed step: those whose logits are wanted."""
