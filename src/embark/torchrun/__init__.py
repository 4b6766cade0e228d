"""torchrun with exit codes that say how the ranks ended."""
