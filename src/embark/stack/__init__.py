"""Which versions of torch, torchrec and fbgemm work together, and which are installed. May import formatting and
errors."""
