"""Readers of checkpoints: a directory or file in, a DecoderSpec and weights on demand out."""
