"""A server that speaks the Hub's protocol: repositories of adapters, in one process.

What a request asks for is answered from a database of refs, commits and trees, and from files that
are named by their sha256. What an adapter is, and how registries keep it, is said in the rooms
below; here is who may read and write it.
"""
