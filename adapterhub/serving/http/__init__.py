"""Serve adapters over HTTP: the walk of a request, and one file for the shapes of each client.

`app.py` is the walk. A shape is a list of endpoints (`call.py`): it says what a client sends and
gets, and knows neither tokens, limits nor metrics. What is computed belongs in the engine.
"""
