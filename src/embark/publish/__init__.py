"""Versions of a model while it trains: the gate and the publisher. May import trainers and below."""
