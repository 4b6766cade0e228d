"""The engines of the torch trainer: how a batch becomes a step. Imports as `trainers.torch` does."""
