"""The kubernetes backend."""
