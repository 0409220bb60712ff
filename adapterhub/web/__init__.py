"""What our servers share: the frame with the walk of a request, tokens, limits of connections.

A server's paths, and what it computes, belong in its own room.
"""
