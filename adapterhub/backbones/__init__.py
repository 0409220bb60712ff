"""Pre-trained models: load one (quantized or not), read its weights, compute its identity.

Nothing here depends on adapters.
"""
