"""Generation of texts: what a client asks for, which texts a step computes, and their pieces.

A model that generates computes many texts at once. `scheduler.py` gives each request to the batches
of its model, `continuous.py` or `batched.py`; `sampling.py` chooses tokens, `detokenize.py` makes
texts of them. What is computed for inputs alone belongs in `engine.py`.
"""
