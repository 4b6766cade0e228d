"""Simulated cloud accounts: the command-line programs of three clouds, of Kubernetes and of Docker, answered from one
state that remembers what was created."""
