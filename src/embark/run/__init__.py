"""The life of a run whichever library trains: the training loop, saves, stops, budget, preemption notices. Imports
plan, data, events, store and spec; neither torch nor jax."""
