"""Looking for examples imports a module: that of Keras would load it into every process."""

collect_ignore = ["keras_api.py"]
