"""Merge adapters into the weights of their backbone, and combine several adapters into one.

Nothing here trains.
"""
