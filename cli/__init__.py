"""The plansmith command."""
