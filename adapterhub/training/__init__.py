"""One training run: data, backbone, preparation, and the resulting files.

Rows, predictions and metrics are defined in tasks/; the training loop is in loop/.
"""
