"""Predictions of memory, step time and cost, the verdict, and calibration. Neither torch nor jax; may import data and
below."""
