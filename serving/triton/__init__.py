"""The models of the repository, on the Python backend. Inside tritonserver: numpy and plansmith.runtime only."""
