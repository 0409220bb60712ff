"""Adapters into the weights of their backbone, and several adapters into one.

Nothing here trains.
"""
