"""Open a trained adapter, predict, evaluate, and write what it is merged into.

Nothing here trains.
"""
