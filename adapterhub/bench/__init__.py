"""Compare methods on one's own data: scores with intervals, paired tests, and a recommendation.

What a study trains and how its results are tested and worded belong here; one training belongs in
training, the page of one run in pages, and how commands print in cli.
"""
