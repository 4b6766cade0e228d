"""Launches runs on Kubernetes, through kubectl. Imports as `launch` does."""
