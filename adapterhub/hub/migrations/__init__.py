"""The changes of a hub's tables from release to release, which alembic applies in their order.

A new hub gets the tables of `database.py` at once; a test compares both ways.
"""
