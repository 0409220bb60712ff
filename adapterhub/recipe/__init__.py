"""The description of a run: its options, its recipe in YAML, and its output folder.

Torch is not imported here. The training steps belong in loop/.
"""
