"""The Python front of the serving core."""
