"""The CUDA-graph engine: the complete step, captured once and replayed. Imports as `trainers.torch` does."""

FEW_SAMPLES = 4096  # Up to here a kernel's start takes as long as its work.
