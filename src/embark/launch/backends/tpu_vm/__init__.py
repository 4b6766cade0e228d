"""The tpu_vm backend."""
