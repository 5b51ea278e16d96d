"""The cpu target: the graph lowered to a linear program with packed weights, and a session to run it."""
