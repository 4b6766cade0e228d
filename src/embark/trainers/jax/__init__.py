"""The trainer in JAX, for TPUs and wherever else JAX runs: the only room that knows jax."""
