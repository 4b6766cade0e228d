"""Scores by an exported model on a GPU: tables in the bits they have, one CUDA graph for each size of batch. Imports
torch and Triton, no TorchRec."""
