"""The vm backend."""
