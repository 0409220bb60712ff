"""Open trained adapters, predict, evaluate, and write merged models.

Training itself belongs in training/; `ah.train` starts it from here.
"""
