"""Dynamic tables: which row an id has, which ids get one and which lose theirs."""
