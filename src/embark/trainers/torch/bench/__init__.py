"""`embark bench`: this trainer and stock TorchRec on the same batches, on this machine, in one run. Imports as
`trainers.torch` does."""
