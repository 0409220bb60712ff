"""Code shared by our servers: the steps of a request, access tokens, and connection limits.

The paths and the computation of a server belong in its own package.
"""
