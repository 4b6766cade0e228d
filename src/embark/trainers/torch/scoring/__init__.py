"""Scores of an exported model, on a CPU or a GPU. Imports torch and Triton, no TorchRec."""
