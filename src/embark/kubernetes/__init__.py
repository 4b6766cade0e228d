"""Kubernetes objects as values: pods, quantities, names and labels, failure policies."""
