"""Options as dataclasses, dicts, YAML and call syntax (`lora(rank=16)`).

Nothing here depends on a method, a task or a model.
"""
