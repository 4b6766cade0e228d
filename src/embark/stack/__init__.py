"""Which torch, torchrec and fbgemm go together."""
