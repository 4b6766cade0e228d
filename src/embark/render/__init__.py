"""What to hand over: the files the clouds need, and what reads them for mistakes."""
