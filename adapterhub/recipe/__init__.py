"""What a run is: its options, its recipe in YAML, and the folder that it is written to.

Torch is not imported here. What makes the steps belongs in loop/.
"""
