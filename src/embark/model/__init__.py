"""A model in numbers, with neither torch nor jax."""
