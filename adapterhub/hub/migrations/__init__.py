"""The changes of a hub's tables from release to release, which alembic applies in their order.

A new hub gets the tables of `tables.py` at once; a test compares both ways.
"""
