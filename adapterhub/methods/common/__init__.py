"""What methods share: their base classes, specs, placement, tensor operations and experts."""
