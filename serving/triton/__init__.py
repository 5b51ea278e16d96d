"""The models of the repository, on Triton's Python backend. Imported inside tritonserver: numpy and the runtime only."""
