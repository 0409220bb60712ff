"""Compare methods on your own data: scores with intervals, paired tests, and a recommendation.

This room plans and runs studies, tests their results and words the conclusions. A single training
run belongs in training, the page of one run in pages, and printing by commands in cli.
"""
