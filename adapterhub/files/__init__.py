"""Our adapter format on disk: tensors, manifest, card, atomic writes. Reads no other library's
files, and touches no model."""
