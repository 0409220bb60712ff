"""Migrations of a hub's tables from release to release, which alembic applies in order.

A new hub gets the tables of `database.py` directly; a test checks that both ways agree.
"""
