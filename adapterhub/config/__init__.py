"""Options as dataclasses, dicts, YAML and call syntax (`lora(rank=16)`).

Independent of methods, tasks and models.
"""
