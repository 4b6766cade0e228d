"""The CUDA-graph engine: the complete step, captured once and replayed. Imports as `trainers.torch` does."""
