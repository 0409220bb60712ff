"""Shared code of methods: base classes, specs, placement, tensor operations and experts."""
