"""Chat templates of strangers run in transformers' sandbox, and print nothing that they like.

What they write for an honest chat is what transformers writes.
"""

from __future__ import annotations

import pytest
from forge import harmless_text

from adapterhub.errors import ConfigError
from adapterhub.tasks.common.chat_template import chat_text
from tests.kit.data import word_tokenizer

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " a <b> 'c'\n\u00e9 \U0001f600"},
    {"role": "assistant", "content": "<think>x</think>yes"},
    {"role": "user", "content": "why"},
]
REFUSED = {
    "an attribute": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an import": "{% import 'x' as y %}",
    "an include": "{% include '/etc/passwd' %}",
    "a message of its own": "{{ raise_exception('\x1b[2J\u202e[bold]' ~ '\n$ sudo') }}",
    "a syntax error": "{% \x1b[2J %}",
    "a mutation": "{{ messages.append(1) }}",
    "an unknown filter": "{{ 1|\u0435xit }}",
}  # fmt: skip
HONEST = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}"
    "{%- set s = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set s = '' %}{%- endif %}"
    "{{- '<|sys|>' ~ s ~ '<|e|>' }}"
    "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>\n\n' + m.content | trim }}{{- eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n\n' }}{%- endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if loop.index0 % 2 == 7 %}"
    "{{ raise_exception('no') }}"
    "{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] ~ eos_token }}{% endif %}{% endfor %}",
    "qwen": "{%- set ns = namespace(last=messages|length - 1, multi=true) %}"
    "{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi and m.role == 'user' and m.content is string and not "
    "(m.content.startswith('<x>') "
    "and m.content.endswith('</x>')) %}{%- set ns.multi = false %}{%- set ns.last = index %}"
    "{%- endif %}"
    "{%- endfor %}{%- for m in messages %}{%- set c = m.content %}{%- if '</think>' in c %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last %}"
    "{{- m.role }}{%- endif %}{{- '<|im_start|>' + m.role + '\n' + c }}{%- endfor %}"
    "{%- if add_generation_prompt and enable_thinking is not defined %}{{- 'go' }}{%- endif %}",
    "json": "{% if tools %}{{ tools|tojson(indent=4) }}{% endif %}{{ messages|tojson }}"
    "{{ messages[0]|items|list }}"
    "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "macro": "{% macro turn(m, end='!') %}{{ m.role|upper }}: {{ m.content }}{{ end }}"
    "{{ caller() if caller }}"
    "{% endmacro %}{% for m in messages %}{{ turn(m) }}"
    "{% call turn(m, end='?') %}c{% endcall %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content|replace('a', 'b') }}"
    "{{ loop.cycle('x', 'y') }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ 'a' * 3 }}{{ 7 // 2 }}",
    "blocks": "{% set x %}{{ messages[0].content }}{% endset %}{{ x|upper }}"
    "{% filter lower %}A{{ x }}{% endfilter %}"
    "{{ '%s and %s' % ('a', 'b') }}{{ {'a': [1, (2, 3)]} }}{{ [1, none, true, 1.5]|tojson }}"
    "{{ '\\n' }}",
    "recursive": "{% for m in messages[:1] recursive %}{{ m.role }}"
    "{{ loop(messages[1:2]) if loop.depth < 3 }}{% endfor %}",
    "functions": "{% set comma = joiner(', ') %}{% for m in messages %}{{ comma() }}"
    "{{ '{}: {}'.format(m.role, m.content) }}{{ '%-9s|'|format(m.role) }}{% endfor %}"
    "{% block end %}{{ 'x'.center(9) }}{% endblock %}",
    "empty": "",
    "text": "a\n  {%- if false %}x{% endif %}  b {# comment #}\n c",
}  # fmt: skip


def tokenizer(template: str):
    made = word_tokenizer("<s>", "</s>")
    made.chat_template = template or " "
    return made


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_template_gives_what_transformers_gives(name, generation_prompt) -> None:
    made = tokenizer(HONEST[name])
    for turns in (TURNS, TURNS[1:2], TURNS[1:3]):
        expected = made.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=generation_prompt
        )
        assert chat_text(made, turns, generation_prompt=generation_prompt) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_template_is_refused(name) -> None:
    made = tokenizer(REFUSED[name])
    with pytest.raises(ConfigError, match="the chat template of") as error:
        chat_text(made, TURNS, generation_prompt=True)
    assert harmless_text(str(error.value))
    assert not [line for line in str(error.value).splitlines()[1:] if not line.startswith("  ")]
