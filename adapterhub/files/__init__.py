"""The native adapter format on disk: tensors, manifest, card, atomic writes.

Does not read other libraries' files and does not touch models.
"""
