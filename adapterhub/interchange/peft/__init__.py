"""Checkpoints of `peft`: read, translated, written."""
