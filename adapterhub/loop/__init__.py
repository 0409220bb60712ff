"""How a run trains: batches, engine, schedule of evaluations, checkpoints, processes and reports.

It knows no method, task or recipe. Which run it is belongs in training/.
"""
