"""Predictions of memory, step time, cost and a verdict; calibration. Knows no torch; may import data and below."""
