"""Which GPUs there are, what a model takes of them, how fast it is there, where plans run. Standard library only."""
