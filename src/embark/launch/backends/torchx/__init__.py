"""Launches runs with TorchX, on Kubernetes with Volcano or on this machine. Imports as `launch` does."""
