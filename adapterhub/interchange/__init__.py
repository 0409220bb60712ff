"""Translates other libraries' adapter checkpoints to and from ours, one folder per library.

Translates for a backbone's anatomy; does not attach anything to a model.
"""
