"""The CUDA graph engine: a step captured once and replayed."""
