"""A cluster inside an account: objects, nodes, a scheduler, kubelets and controllers, without an API server."""
