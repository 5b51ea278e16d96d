"""TensorRT-LLM checkpoint directories: config.json with `architecture`, and rank0.safetensors and so on."""
