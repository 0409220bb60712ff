"""The page of a run, report.html: its curves, scores and mistakes; and comparing runs.

Reading a run's files, drawing and statistics belong here; training calls it, and how commands print
belongs in cli.
"""
