"""Pages: the report of a run, comparisons of runs, and the site of a registry.

This room reads the files of runs and registries, and contains charts and statistics. training and
cli call it. Printing by commands belongs in cli.
"""
