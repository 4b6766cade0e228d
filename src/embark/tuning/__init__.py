"""Hyperparameter search by Optuna: every trial is a run of the same training loop. Neither torch nor jax; may import
trainers and below."""
