"""Merge adapters into the weights of their backbone, and several adapters into one."""
