"""Checkpoints of `peft`: read, write, import, export."""
