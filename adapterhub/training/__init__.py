"""One training run: recipe, preparation, loop, engine, checkpoint, report.

Tasks (rows, predictions and metrics) are in tasks/.
"""
