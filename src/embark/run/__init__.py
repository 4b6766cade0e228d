"""The life of a run, whichever library trains: the training loop, saves, stops, budget, preemption notices. Neither
torch nor jax; may import plan and below."""
