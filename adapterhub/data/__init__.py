"""Examples (texts and labels) from files and the Hub.

Nothing here depends on a tokenizer, a task or a model.
"""
