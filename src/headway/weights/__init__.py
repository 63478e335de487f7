"""Moving a version of the weights from the trainer into the engines."""
