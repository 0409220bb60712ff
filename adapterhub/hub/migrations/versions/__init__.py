"""One file for each migration of the tables."""
