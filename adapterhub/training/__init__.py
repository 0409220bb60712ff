"""One training run: data, backbone, preparation, and the files that are left.

What a row, a prediction or a metric is belongs in tasks/; the loop itself is in loop/.
"""
