"""Raw files to the prepared format: `prepare.prepare` does it. Workers import the modules they need, and only those."""
