"""One ONNX graph for every target: its contract, its blocks, and how precision is written into it."""
