"""Adapters into the backbone's weights, and several adapters into one. Trains nothing."""
