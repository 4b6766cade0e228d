"""Launches runs on TPU VMs, as queued resources. Imports as `launch` does."""
