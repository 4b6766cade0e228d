"""torchrun with an exit code that says how the ranks ended. May import torch, cli and errors."""
