"""How a module enters the forward pass: one file an entry point.

Imports no method, adapter or file.
"""
