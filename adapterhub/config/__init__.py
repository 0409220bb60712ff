"""Options as dataclasses, dicts, YAML and call syntax (`lora(rank=16)`).

Imports no method, task or model.
"""
