"""A tritonserver as a child: found, started, watched, healed, drained and ended."""
