"""A Kubernetes cluster inside an account: objects, nodes, a scheduler, kubelets and controllers."""
