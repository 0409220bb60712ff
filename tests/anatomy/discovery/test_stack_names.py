"""Names of stacks."""

from __future__ import annotations

from adapterhub.anatomy.discovery.row import named
from adapterhub.anatomy.family import Stack


def test_stacks_are_named_after_what_they_read(subtests):
    cases = [
        ([("decoder", "layers")], True, ["decoder"]),
        ([("encoder", "text_model.layers")], True, ["encoder"]),
        ([("encoder", "encoder.layers"), ("decoder", "decoder.layers")], False,
         ["encoder", "decoder"]),
        ([("encoder", "visual.blocks"), ("decoder", "language_model.layers")], True,
         ["vision", "language"]),
        ([("encoder", "vision_model.layers"), ("encoder", "text_model.layers")], True,
         ["vision", "language"]),
        ([("encoder", "image_a.layers"), ("encoder", "image_b.layers")], False,
         ["vision", "vision2"]),
        ([("encoder", "audio_tower.layers"), ("decoder", "layers")], True, ["audio", "decoder"]),
    ]  # fmt: skip
    for stacks, by_input, names in cases:
        with subtests.test(stacks=stacks):
            found = named([Stack(name, path, {}) for name, path in stacks], by_input)
            assert [stack.name for stack in found] == names
            assert [stack.layers for stack in found] == [path for _, path in stacks]
