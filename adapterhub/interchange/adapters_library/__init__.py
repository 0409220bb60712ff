"""Checkpoints of `adapters` (AdapterHub): read and translated."""
