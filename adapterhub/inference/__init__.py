"""Open a trained adapter, predict and evaluate.

Nothing here trains or writes files.
"""
