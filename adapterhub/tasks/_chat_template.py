"""Chat templates, which come with backbones and adapters of strangers, within limits.

transformers renders them in Jinja's sandbox, which stops code but not work: two loops over `range`
run for hours, and forty lines that double a text fill the memory. Here the same template runs in an
environment that counts: every iteration, call, filter, operator and output is a step, every value
has a size, and only functions whose results have a known size can be called. The text is the same.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from adapterhub.errors import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 4 << 20  # of a value, and of all output: a million tokens
MOST_ITEMS = 200_000  # in lists and objects at every level: 40,000 messages
MOST_STEPS = 300_000  # a chat of 1,000 messages takes about 20,000
MOST_SECONDS = 10.0  # of CPU time; a step on the largest values takes milliseconds
_MOST_BITS = 256  # of an integer, so that powers end
_MOST_WIDTH = 32  # spaces of an indentation
_METHODS = {
    str: "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title "
    "capitalize swapcase casefold replace join find rfind index rindex count isdigit isalpha "
    "isspace isupper islower isnumeric isalnum isdecimal removeprefix removesuffix partition "
    "rpartition",
    dict: "get items keys values copy",
    list: "index count copy",
    tuple: "index count",
}
_ALLOWED = {(kind, name) for kind, names in _METHODS.items() for name in names.split()}
_FILTERS = frozenset(
    [
        "trim",
        "tojson",
        "length",
        "count",
        "join",
        "string",
        "list",
        "map",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "upper",
        "lower",
        "title",
        "capitalize",
        "default",
        "d",
        "first",
        "last",
        "replace",
        "items",
        "dictsort",
        "int",
        "float",
        "abs",
        "round",
        "sort",
        "unique",
        "reverse",
        "escape",
        "e",
        "safe",
        "min",
        "max",
        "sum",
        "attr",
        "indent",
        "wordcount",
        "truncate",
    ]
)
_GLOBALS = ("range", "dict", "namespace", "raise_exception", "strftime_now", "cycler", "joiner")
_TRUSTED = (Extension, LoopContext)  # whose methods call macros, or return an argument
_OF_LOOPS = ("_loop_vars", "_block_vars")  # Jinja's own arguments of each call
_FORMAT = re.compile(r"(?:[^%]|%(?:\(\w+\))?[sdr%])*")


class TemplateLimitError(Exception):
    """A template exceeds a limit, or calls what has none."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    *,
    generation_prompt: bool,
    template: str | None = None,
) -> str:
    """Format a chat by a template, as `apply_chat_template` does.

    Args:
        tokenizer: the tokenizer.
        turns: the messages, each with role and content: a text, or a list of parts.
        generation_prompt: end with the beginning of a response.
        template: the template, if it is not the tokenizer's.

    Raises:
        ConfigError: the template is broken, refuses the chat, or exceeds a limit.
    """
    try:
        source = str(tokenizer.get_chat_template()) if template is None else template
        compiled = _compiled(source, threading.get_ident())
        environment: Any = compiled.environment
        environment.restart()
        values = {"messages": [dict(turn) for turn in turns], "tools": None, "documents": None}
        special = {name: str(text) for name, text in _special_tokens(tokenizer)}
        return str(compiled.render(**values, add_generation_prompt=generation_prompt, **special))
    except Exception as error:  # a template raises anything, and its message is its own
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} cannot be applied: "
            f"{type(error).__name__}: {one_line(str(error), 300)}",
            expected=f"at most {MOST_STEPS:,} steps and {MOST_CHARACTERS:,} characters",
            hint="correct tokenizer.chat_template, or use pairs with a template of the task",
        ) from None


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, object]]:
    """Yield the special tokens that a template may name, as transformers passes them."""
    for name, token in tokenizer.special_tokens_map.items():
        if not isinstance(token, (list, dict)):
            yield name, token


@functools.lru_cache(maxsize=16)
def _compiled(source: str, thread: int) -> Any:
    """Compile a template for a thread: its environment holds the state of a rendering."""
    from transformers.utils import chat_template_utils

    theirs: Any = chat_template_utils._compile_jinja_template("").environment
    extensions = [type(extension) for extension in theirs.extensions.values()]
    environment = _CountingEnvironment(extensions)
    environment.adopt(theirs)
    return environment.from_string(source)


class _Steps(NodeTransformer):
    """Puts a step before each iteration, output and assignment, and a check around each value."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(0))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        written = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        return [_step(written), node]

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        self.generic_visit(node)
        return [_step(0), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("concatenated", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("checked", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("checked", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("checked", [node]) if node.ctx == "load" else node


def _own_call(name: str, arguments: list[nodes.Expr]) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _step(written: int) -> nodes.Stmt:
    return nodes.ExprStmt(_own_call("step", [nodes.Const(written)]))


class _CountingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a count of steps and characters, and only functions of known size."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, extensions: list[type[Extension]]) -> None:
        options: dict[str, Any] = {"finalize": self.printed, "cache_size": 0}
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, **options)
        self.restart()

    def restart(self) -> None:
        """Begin a rendering."""
        self.steps, self.characters, self.start = 0, 0, time.thread_time()

    def adopt(self, other: Environment) -> None:
        """Take over the functions of another environment that have a known size."""
        known = {name: other.filters[name] for name in _FILTERS}
        self.filters = {name: self._counted(name, function) for name, function in known.items()}
        self.globals = {name: other.globals[name] for name in _GLOBALS}

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        _Steps().visit(source)
        source.set_environment(self)
        return str(super()._generate(source, *rest, **options))

    def step(self, written: int) -> None:
        """Count a step that writes so many characters."""
        self.steps += 1
        self.characters += written
        if self.steps > MOST_STEPS:
            raise TemplateLimitError(f"more than {MOST_STEPS} steps")
        if self.characters > MOST_CHARACTERS:
            raise TemplateLimitError(f"writes more than {MOST_CHARACTERS} characters")
        if time.thread_time() - self.start > MOST_SECONDS:
            raise TemplateLimitError(f"more than {MOST_SECONDS} s")

    def checked(self, value: Any) -> Any:
        """Return a value, if it is not too large."""
        _size(value)
        return value

    def printed(self, value: Any) -> str:
        """Return the text of a value that is written."""
        text = str(self.checked(value))
        self.step(len(text))
        return text

    def concatenated(self, *values: Any) -> str:
        """Join texts, as `~` does."""
        return str(self.checked("".join(map(str, self.checked(list(values))))))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator to values whose result has a known size."""
        self.step(0)
        _check_operator(operator, left, right)
        return self.checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call a macro, or a function whose result has a known size."""
        owner = getattr(function, "__self__", None)
        if owner is self and function.__name__ in ("step", "checked", "concatenated"):
            return function(*args)
        self.step(0)
        if isinstance(function, (Macro, LoopContext)) or isinstance(owner, _TRUSTED):
            return super().call(context, function, *args, **options)
        name = getattr(function, "__name__", type(function).__name__)
        if not any(function is known for known in self.globals.values()):
            if (type(owner), name) not in _ALLOWED:
                raise TemplateLimitError(f"calls {name}, which chat templates cannot")
            _check_call(name, owner, args)
        elif name == "strftime_now" and re.search(r"%[^a-zA-Z%]", str(args)):
            raise TemplateLimitError("calls strftime_now with a width")
        _size([*args, *(value for key, value in options.items() if key not in _OF_LOOPS)])
        return self.checked(super().call(context, function, *args, **options))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts a step and checks what it is applied to."""

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            self.step(0)
            given = [list(_limited(a)) if isinstance(a, Iterator) else a for a in args]
            values = [a for a in given if not isinstance(a, Environment)]
            _size([*values, *options.values()])
            _check_filter(name, values, options)
            return self.checked(function(*given, **options))

        return counted


def _size(value: Any) -> int:
    """Return the size of a value: its characters and items, at every level.

    Raises:
        TemplateLimitError: it has more than `MOST_CHARACTERS` or `MOST_ITEMS`.
    """
    total, items, queue = 0, 0, [value]
    while queue:
        item = queue.pop()
        total, items = total + 1, items + 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, (list, tuple, set)):
            queue += item
        elif isinstance(item, Mapping):
            queue += [*item.keys(), *item.values()]
        elif isinstance(item, Namespace):
            queue.append(object.__getattribute__(item, "_Namespace__attrs"))
        elif isinstance(item, int) and item.bit_length() > _MOST_BITS:
            raise TemplateLimitError(f"an integer of more than {_MOST_BITS} bits")
        if total > MOST_CHARACTERS or items + len(queue) > MOST_ITEMS:
            raise TemplateLimitError(
                f"a value of more than {MOST_CHARACTERS} characters or {MOST_ITEMS} items"
            )
    return total


def _limited(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of an iterator until they are too large together."""
    total = 0
    for item in items:
        total += _size(item)
        if total > MOST_CHARACTERS:
            raise TemplateLimitError(f"a value of more than {MOST_CHARACTERS} characters")
        yield item


def _check_operator(operator: str, left: Any, right: Any) -> None:
    sizes = _size(left), _size(right)
    if operator == "*":
        for value, size, count in ((left, sizes[0], right), (right, sizes[1], left)):
            if not isinstance(value, (int, float)):
                _check_size(size * int(count))
    elif operator == "**" and not (abs(left) <= 2**16 and abs(right) <= 16):
        raise TemplateLimitError("a power of large numbers")
    elif operator == "%" and isinstance(left, str) and not _FORMAT.fullmatch(left):
        raise TemplateLimitError("formats a text with a width")
    elif operator == "%" and isinstance(left, str):
        _check_size(sizes[0] + left.count("%") * sizes[1])


def _check_call(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Refuse a method whose result would be too large, before it is made."""
    _size(owner)
    if name == "replace":
        _check_replaced(owner, *args[:2])
    elif name == "join":
        items = list(_limited(iter(args[0])))
        _check_size(_size(items) + len(owner) * len(items))


def _check_filter(name: str, values: list[Any], options: dict[str, Any]) -> None:
    """Refuse a filter whose result would be too large, before it is made."""
    numbers = [n for n in (*values[1:], *options.values()) if isinstance(n, int)]
    if name in ("indent", "tojson") and max(map(abs, numbers), default=0) > _MOST_WIDTH:
        raise TemplateLimitError(f"indents by more than {_MOST_WIDTH}")
    texts = [str(v) for v in values if isinstance(v, (str, int))]
    if name == "replace" and len(texts) >= 3:
        _check_replaced(*texts[:3])
    elif name == "indent" and len(texts) > 1:
        _check_size(len(texts[0]) + (texts[0].count("\n") + 1) * max(map(len, texts[1:])))
    elif name == "join":
        items = [v for v in values if isinstance(v, (list, tuple, Mapping, str))]
        separators = sum(len(v) for v in items[1:] if isinstance(v, str))
        _check_size(_size(items) + separators * max(map(len, items), default=0))


def _check_replaced(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TemplateLimitError(f"a value of more than {MOST_CHARACTERS} characters")
