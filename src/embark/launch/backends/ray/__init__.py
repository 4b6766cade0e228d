"""The ray backend."""
