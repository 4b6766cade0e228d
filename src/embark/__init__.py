"""Embark trains recommendation models on TorchRec: one spec says what the run is, every verb works from it."""

__version__ = "0.1.0"
