"""Faster ways to compute what a model computes, each tried before it is used.

What tries them is loop/speedups.py.
"""
