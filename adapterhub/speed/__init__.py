"""Faster ways to compute a model, each checked before it is used.

loop/speedups.py performs the checks.
"""
