"""A server that speaks the Hub's protocol: repositories of adapters, in one process.

Requests are answered from a database of refs, commits and trees, and from files that are named by
their sha256. Other rooms define adapters and how registries store them. This room decides who may
read and write them.
"""
