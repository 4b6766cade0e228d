"""The libraries that train: torch and jax."""
