"""The account that pays: may the machines that a run asks for start, and may the run write where it wants to."""
