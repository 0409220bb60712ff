"""The training of a run: batches, engine, evaluations, checkpoints, processes and reports.

This room does not depend on methods, tasks or recipes. The choice of a run belongs in training/.
"""
