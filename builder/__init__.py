"""Checkpoint in, engine directory out: readers, the graph, and a compiler for each target."""
