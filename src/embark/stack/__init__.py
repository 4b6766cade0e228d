"""Which torch, torchrec and fbgemm versions work together, and which are installed. May import: errors."""
