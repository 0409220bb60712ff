"""Text generation: requests, the texts computed in a step, and their pieces.

A model generates many texts at once. `scheduler.py` assigns each request to the batches of its
model, in `continuous.py` or `batched.py`; `sampling.py` chooses tokens, and `detokenize.py` turns
them into texts. Computation that needs inputs alone belongs in `engine.py`.
"""
