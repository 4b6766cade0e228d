"""Making it happen: every side effect outside this machine's files, and what went wrong with it."""
