"""A cloud account that remembers: the command-line programs of three clouds, of Kubernetes and of Docker, answered from
one state. It may import what `rehearse` may; nothing outside `rehearse` and `cli` imports it."""
