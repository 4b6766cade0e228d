"""The torchx backend."""
