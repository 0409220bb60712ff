"""Hooks that insert modules into the forward pass: one file per entry point.

Depends on sites and on the classes in methods/common/site_module.py, not on methods or adapters.
"""
