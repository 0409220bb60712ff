"""What our servers share: tokens, headers of security, limits of connections, the request log.

A server's paths, and what it computes, belong in its own room.
"""
