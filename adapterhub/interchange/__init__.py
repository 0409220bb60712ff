"""Other libraries' adapter formats, one folder each, translated to and from ours.

Attaches nothing to a model.
"""
