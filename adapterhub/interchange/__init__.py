"""Other libraries' adapter formats, a folder each, translated to and from ours.

Translates for a backbone's anatomy; attaches nothing to a model.
"""
