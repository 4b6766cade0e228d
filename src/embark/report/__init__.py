"""One page about a run, or about several side by side: what was run, how it went, what it took."""
