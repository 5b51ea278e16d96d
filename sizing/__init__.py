"""Which GPUs there are, what a model takes of them, how fast it can be, which plan runs where. Standard library only."""
