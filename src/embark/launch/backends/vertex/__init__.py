"""The vertex backend."""
