"""What a front-end needs is imported where that front-end runs."""

collect_ignore = ["on_keras.py", "on_torch.py", "worker.py"]
