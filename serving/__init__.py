"""What stands between the network and an engine: Triton's models, the OpenAI server, metrics."""
