"""One training run: recipe, loop, checkpoint, report.

What a row, a prediction or a metric is belongs in tasks/.
"""
