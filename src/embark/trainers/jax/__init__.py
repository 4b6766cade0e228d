"""The JAX trainer, for TPUs and wherever else JAX runs: the only package that imports jax. May import run and below."""
