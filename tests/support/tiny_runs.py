"""A run that is over in a second, for tests of what comes of one."""

TINY = {
    "name": "tiny",
    "model": {"num_dense": 3, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16], "num_tables": 4,
              "rows_per_table": 50},
    "data": {"num_train_samples": 4096, "num_eval_samples": 300},
    "train": {"batch_size": 128, "precision": "fp32", "num_steps": 6},
    "place": {"device": "cpu"},
    "store": {"checkpoint_at_end": False},
    "watch": {"every": 1, "tensorboard": False},
}
