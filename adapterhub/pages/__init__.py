"""Pages: a run's report.html with curves, scores and mistakes, comparing runs; a registry's site.

Reading a run's files and what a registry has, drawing and statistics belong here; training and cli
call it, and how commands print belongs in cli.
"""
