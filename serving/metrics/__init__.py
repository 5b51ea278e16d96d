"""The metrics under the names that dashboards of TensorRT-LLM's Triton backend read, and some of our own."""
