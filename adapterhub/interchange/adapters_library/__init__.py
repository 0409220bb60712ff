"""Checkpoints of `adapters` (AdapterHub): read and import."""
