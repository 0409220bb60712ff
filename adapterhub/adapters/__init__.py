"""The life of an adapter: build, attach, activate, route, load, save, export, detach.

Equations belong in methods/, hooks in hooks/, stores in registry/.
"""
