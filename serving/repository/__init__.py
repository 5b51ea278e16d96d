"""Model repositories: written for an engine, and read from an older stack's."""
