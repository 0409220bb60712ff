"""Publish, find and fetch immutable versions of adapters, in a folder or on the Hub.

Handles files; only `load` touches a model.
"""
