"""Chat templates of strangers: none runs for long, fills the memory or prints what it likes.

What they write for an honest chat is what transformers writes.
"""

from __future__ import annotations

import resource
import time

import pytest
from fixtures import word_tokenizer
from forge import harmless_text
from selection import rotate

from adapterhub.errors import ConfigError
from adapterhub.tasks._chat_template import MOST_CHARACTERS, MOST_SECONDS, chat_text

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " a <b> 'c'\n\u00e9 \U0001f600"},
    {"role": "assistant", "content": "<think>x</think>yes"},
    {"role": "user", "content": "why"},
]
DOUBLE = "{% set x = 'aaaaaaaaaa' %}"
BOMBS = {
    "one loop": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}"
    "{% endfor %}",
    "a loop of large texts": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "a product": "{{ 'x' * 10**10 }}",
    "a product of a variable": "{% set n = 10**10 %}{{ messages[0].role * n }}",
    "a list's product": "{% set x = [1] * 10**9 %}",
    "a power": "{{ 10**10**10 }}",
    "powers of powers": "{% set n = 99999 %}{{ n ** n ** n }}",
    "products of integers": "{% set ns = namespace(n=3) %}{% for i in range(9999) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a shift by division": "{{ (2**999999999) // 3 }}",
    "doubling by ~": DOUBLE + "{% set x = x ~ x %}" * 60 + "{{ x }}",
    "doubling by +": DOUBLE + "{% set x = x + x %}" * 60 + "{{ x }}",
    "doubling by join": DOUBLE + "{% set x = x.join([x, x, x]) %}" * 30 + "{{ x }}",
    "doubling by the filter join": DOUBLE + "{% set x = [x, x, x]|join(x) %}" * 30 + "{{ x }}",
    "squaring by replace": DOUBLE + "{% set x = x.replace('a', x) %}" * 9 + "{{ x }}",
    "squaring by the filter replace": DOUBLE + "{% set x = x|replace('a', x) %}" * 9 + "{{ x }}",
    "replacing nothing": DOUBLE + "{% set x = x.replace('', x) %}" * 9 + "{{ x }}",
    "doubling lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "doubling tuples": "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 60 + "{{ {x: 1} }}",
    "doubling dicts": "{% set x = {} %}" + "{% set x = {1: x, 2: x} %}" * 60 + "{{ x|tojson }}",
    "doubling namespaces": "{% set x = namespace() %}"
    + "".join("{% set y = namespace(a=x, b=x) %}{% set x = y %}" for _ in range(60)) + "{{ x }}",
    "doubling a namespace's list": "{% set ns = namespace(x=[1]) %}"
    + "{% set ns.x = ns.x + ns.x %}" * 60 + "{{ ns.x }}",
    "comparing": "{% set x = [1] %}{% set y = [1] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60 + "{{ x == y }}",
    "a macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop that calls itself": "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "blocks of macros": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40 + "x" + "{% endcall %}" * 40,
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of a variable": "{{ '%*d' % (999999999, 1) }}",
    "a format": "{{ '{:>999999999}'.format(1) }}",
    "the filter format": "{{ '%999999999d'|format(1) }}",
    "center": "{{ 'x'.center(999999999) }}",
    "the filter center": "{{ 'x'|center(999999999) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "tabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'x\ny'|indent(10**9, true) }}",
    "indented JSON": "{{ messages|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "translate": "{{ 'aaaa'.translate({97: 'x' * 1000}) }}" * 9,
    "a map of large texts": DOUBLE + "{% set x = x + x %}" * 15
    + "{{ range(99999)|map('string')|map('replace', '', x)|join }}",
    "a map of many": "{% for i in range(99999) %}{{ range(99999)|map('string')|join|length }}"
    "{% endfor %}",
    "a set block": "{% set x = 'aaaaaaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "a filter block": "{% filter upper %}{% for i in range(99999) %}{{ messages }}"
    "{% endfor %}{% endfilter %}",
    "a time": "{{ strftime_now('%999999999Y') }}",
    "a deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a long number": "{{ " + "9" * 100_000 + " }}",
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


@rotate("name", BOMBS)
def test_a_hostile_template_is_stopped(name) -> None:
    made = tokenizer(BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with pytest.raises(ConfigError, match="the chat template of") as error:
        chat_text(made, TURNS, generation_prompt=True)
    assert time.thread_time() - start < 2 * MOST_SECONDS
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300 << 10, "300 MB"
    assert harmless_text(str(error.value))
    assert not [line for line in str(error.value).splitlines()[1:] if not line.startswith("  ")]


def test_long_chats_are_within_the_limits() -> None:
    turns = [{"role": "user", "content": "word " * 100}] * 1000
    for name in ("qwen",):
        text = chat_text(tokenizer(HONEST[name]), turns, generation_prompt=False)
        assert 500_000 < len(text) < MOST_CHARACTERS


def test_the_tables_are_full() -> None:
    assert len(BOMBS) >= 55
    assert len(HONEST) >= 12
