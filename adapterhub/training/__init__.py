"""One training run: recipe, preparation, loop, engine, checkpoint, report.

What a row, a prediction or a metric is belongs in tasks/.
"""
