"""Hostile templates: no way to Python's internals, no way to run or grow without bound, in the calling
thread.
"""

from __future__ import annotations

import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.text.chat_renderer import ChatAsk, ChatTemplate
from quire.text.meter import TemplateLimits
from quire.types import CheckpointError, QuireError, RequestError

ASK = ChatAsk(messages=[{"role": "user", "content": "hi"}])
NS = "{% set ns = namespace(x='aa', l=[1], m=[1]) %}{% for i in range(200) %}"
END = "{% endfor %}"

# template -> the limit it runs into
BOMBS = {
    "{% for i in range(10**9) %}{% endfor %}": "range of more than 100000",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "2000000 steps",
    "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}": "2000000 steps",
    "{{ range(0 - 10**18, 10**18, 3) }}": "range of more than",
    "{{ range(10**30) }}": "range of more than",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}": "2000000 steps",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}": "recursion",
    "{% for x in range(999) recursive %}{{ loop(range(999)) if loop.depth < 5 }}{% endfor %}": "steps",
    "{{ 'a' * 10**9 }}": "text of 1000000000",
    "{{ 10**9 * 'a' }}": "text of 1000000000",
    "{{ [1] * 10**9 }}": "list of 1000000000",
    "{{ (10 ** 1000) ** 1000 }}": "integer of",
    "{{ 2 ** 100000 }}": "integer of",
    NS + "{% set ns.n = (ns.n or 3) * (ns.n or 3) %}" + END: "integer of",
    NS + "{% set ns.x = ns.x + ns.x %}" + END: "(text of|steps)",
    NS + "{% set ns.x = ns.x ~ ns.x %}" + END: "(text of|steps)",
    NS + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}" + END: "(text of|steps)",
    NS + "{% set ns.x = [ns.x, ns.x] | join %}" + END: "(text of|steps)",
    NS + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}" + END: "(text of|steps)",
    NS + "{% set ns.x = '{0}{0}'.format(ns.x) %}" + END: "(text of|steps)",
    NS + "{% set ns.x = ns.x.replace('a', 'aa') %}" + END: "(text of|steps)",
    NS + "{% set ns.x = ns.x | replace('a', 'aa') %}" + END: "(text of|steps)",
    NS + "{% set ns.x = ns.x.join(['', ns.x, '']) %}" + END: "(text of|steps)",
    NS + "{% set ns.l = ns.l + ns.l %}" + END: "list of",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l | tojson }}": "(text of|steps)",
    NS + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}" + END + "{{ ns.l | tojson }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l ~ '' }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l | string }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns.l | upper }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ '%s' % [ns.l] }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ '{}'.format(ns.l) }}": "(text of|steps)",
    NS
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    + END
    + "{{ ns.l == ns.m }}": "(text of|steps)",
    NS
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    + END
    + "{{ ns.l is eq(ns.m) }}": "(text of|steps)",
    NS
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    + END
    + "{{ [ns.l].index(ns.m) }}": "(text of|steps)",
    NS
    + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    + END
    + "{{ [ns.l, ns.m] | max }}": "(text of|steps)",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ '{0!r}'.format(ns.l) }}": "text of",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ {'a': ns.l}.values() }}": "text of",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ {'a': ns.l}.items() ~ '' }}": "text of",
    NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ raise_exception(ns.l) }}": "text of",
    NS + "{% set ns.t = (ns.t, ns.t) %}" + END + "{{ {ns.t: 1} }}": "text of",
    NS + "{% set ns.t = (ns.t,) * 2 %}" + END + "{{ {ns.t: 1} }}": "text of",
    "{% macro f() %}{% set ns.t = varargs %}{% endmacro %}"
    + NS
    + "{% set _ = f(ns.t, ns.t) %}"
    + END: "text of",
    "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}": "steps",
    "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') }}": "steps",
    "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}": "steps",
    "{{ ('a' * 4000000).rsplit('b' ~ 'a' * 2000000) }}": "steps",
    "{{ ('f' * 4000000) | int(0, 16) }}": "width of",
    "{{ ('a ' * 4000000) | title }}": "list of",
    "{{ ('a ' * 4000000) | wordcount }}": "list of",
    "{{ ('ab' * 4000000) | list | length }}": "list of",
    "{{ ('ab' * 4000000) | sort | length }}": "list of",
    "{{ '%1000000000d' % 1 }}": "width of 1000000000",
    "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}": "width of 1000000000",
    "{{ '%.1000000000f' % 1.5 }}": "width of 1000000000",
    "{{ '%*d' % (10**9, 1) }}": "width from a value",
    "{{ '%1000000000d' | format(1) }}": "width of 1000000000",
    "{{ ('%1000000000d' | safe) % 1 }}": "width of 1000000000",
    "{{ '{:1000000000d}'.format(1) }}": "width of 1000000000",
    "{{ '{:{w}d}'.format(1, w=10**9) }}": "width of 1000000000",
    "{{ '{a:>1000000000}'.format_map({'a': 1}) }}": "width of 1000000000",
    "{{ ('{:1000000000d}' | safe).format(1) }}": "width of 1000000000",
    "{{ ('{:1000000000d}' | attr('format'))(1) }}": "width of 1000000000",
    "{{ 'a' | center(10**9) }}": "width of 1000000000",
    "{{ 'a'.center(10**9) }}": "width of 1000000000",
    "{{ 'a'.ljust(10**9) }}": "width of 1000000000",
    "{{ 'a'.zfill(10**9) }}": "width of 1000000000",
    "{{ 'a\t'.expandtabs(10**9) }}": "width of 1000000000",
    "{{ 'a\t'.expandtabs(tabsize=10**9) }}": "width of 1000000000",
    "{{ ('a' | safe).rjust(10**9) }}": "width of 1000000000",
    "{{ ('a\n' * 1000) | indent(10**8) }}": "width of 100000000",
    "{{ ('a\n' * 100000) | indent('b' * 4000) }}": "text of",
    "{{ ('a' * 10000).replace('', 'b' * 10000) }}": "text of",
    "{{ ('b' * 1000).join('a' * 100000) }}": "text of",
    "{{ ('a' * 100000) | join('b' * 1000) }}": "text of",
    "{{ range(100000) | map('string') | join('b' * 1000) }}": "text of",
    "{{ [1] | batch(10**9, 'x') | list }}": "list of 1000000000",
    "{{ [1] | slice(10**9) | list }}": "list of 1000000000",
    "{{ 2.5 | round(10**9, 'ceil') }}": "rounded to",
    "{{ [1] | tojson(indent=10**9) }}": "indented JSON by",
    "{{ range(1000) | list | tojson(separators=('x' * 4000, ':' * 4000)) }}": "text of",
    "{{ range(50000) | map('string') | map('list') | list | tojson(indent='x' * 4000) }}": "text of",
    "{{ [[1]] | sum(start=[]) }}": "other than numbers",
    "{{ ('a ' * 2000000).split() }}": "list of 2000001",
    "{{ (range(100000) | list * 10) | sort }}": "text of",
    "{{ strftime_now('%Y' * 10000) }}": "time format",
    "{% for i in range(99999) %}{% set x = ('ab' * 1000000)[1:] %}{% endfor %}": "steps",
    "{% for i in range(99999) %}{% set x = ('ab' * 1000000) | upper %}{% endfor %}": "steps",
    "{% set a = 'ab' * 1000000 %}{% for i in range(99999) %}{{ a == a ~ '' }}{% endfor %}": "steps",
    "{% set a = 'ab' * 1000000 %}{% for i in range(99999) %}{{ 'c' in a }}{% endfor %}": "steps",
}


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_stop_at_the_limit_they_name(source):
    slow_machine = TemplateLimits(seconds=3600.0)
    with pytest.raises(CheckpointError, match=f"chat template was stopped: .*{BOMBS[source]}"):
        ChatTemplate(source, limits=slow_machine).render(ASK)


def test_memory_stays_small_whatever_the_bomb():
    # Those that walk shared lists or count steps allocate nothing, but take long under tracing.
    quick = [source for source, limit in BOMBS.items() if "steps" not in limit and "ns.l" not in source]
    quick = [source for source in quick if "range(" not in source]
    tracemalloc.start()
    try:
        for source in quick:
            with pytest.raises(CheckpointError):
                ChatTemplate(source).render(ASK)
        assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    finally:
        tracemalloc.stop()


def test_printing_a_namespace_prints_none_of_its_values():
    source = NS + "{% set ns.l = [ns.l, ns.l] %}" + END + "{{ ns }}{{ ns ~ '' }}{{ ns | string }}"
    assert ChatTemplate(source).render(ASK).text == "<Namespace>" * 3


def test_output_is_bounded_and_is_the_request_s_problem():
    with pytest.raises(RequestError, match="rendered prompt exceeds the limit of 8388608 characters"):
        ChatTemplate("{% for i in range(99999) %}{{ 'abc' * 1000 }}{% endfor %}").render(ASK)
    with pytest.raises(RequestError, match="rendered prompt exceeds the limit of 10 characters"):
        ChatTemplate("{% for i in range(9) %}ab{% endfor %}", limits=TemplateLimits(output_chars=10)).render(
            ASK
        )


def test_seconds_are_a_limit_too():
    limits = TemplateLimits(seconds=0.0, steps=10_000_000)
    with pytest.raises(CheckpointError, match="more than 0 seconds"):
        ChatTemplate("{% for i in range(90000) %}{% endfor %}", limits=limits).render(ASK)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ ('{0.__class__}' | safe).format('') }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "{{ ('{0.__class__}' | attr('format'))('') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ [''] | sort(attribute='__class__') }}",
    "{{ [''] | groupby('__class__') }}",
    "{{ ''.join.__self__ }}",
    "{{ namespace.__init__ }}",
    "{{ namespace(_a=1) }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ cycler.__init__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
    "{% for i in [1] %}{{ loop._iterator.gi_frame }}{% endfor %}",
    "{{ (messages | map('upper')).__next__ }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ messages.append(1) }}",
    "{{ {'a': 1}.update({'b': 2}) }}",
    "{{ {'a': 1}.pop('a') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_walks_to_internals_are_refused(source):
    with pytest.raises(CheckpointError, match=r"not allowed|may not be called"):
        ChatTemplate(source).render(ASK)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ x | no_such_filter }}",
        "{{ x is no_such_test }}",
        "{{ x | pprint }}",
        "{{ x | xmlattr }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 1" + " * 1" * 5000 + " }}",
        "{{ x" + ".a" * 5000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 5000 + " }}",
        "{{ 0x" + "f" * 5000 + " }}",
        "{% generation %}",
        "{{ 'x' }} \x00 {% break %}",
        "x" * (2 << 20),
    ],
    ids=range(19),
)
def test_a_template_that_does_not_compile_is_a_checkpoint_error(source):
    with pytest.raises(CheckpointError, match=r"chat template (does not compile|has)"):
        ChatTemplate(source)


def test_lazy_filters_stay_iterators_that_are_always_true():
    """`if messages | selectattr(...)` is true even for no match, as in transformers; only length fails."""
    source = "{{ 1 if messages | selectattr('role', 'equalto', 'nobody') else 2 }}"
    assert ChatTemplate(source).render(ASK).text == "1"
    with pytest.raises(RequestError, match="len"):
        ChatTemplate("{{ messages | map('length') | length }}").render(ASK)


def test_nested_lazy_filters_do_not_nest():
    source = (
        "{% set ns = namespace(g=['a']) %}"
        + "{% for i in range(20000) %}{% set ns.g = ns.g | map('upper') %}"
    )
    assert ChatTemplate(source + "{% endfor %}{{ ns.g | list }}").render(ASK).text == "['A']"


def test_threads_do_not_share_a_meter():
    """One thread's bomb takes nothing from another's allowance, and both see their own messages."""
    template = ChatTemplate("{% for i in range(20000) %}{% set x = i %}{% endfor %}{{ messages[0].content }}")
    texts: list[str] = []

    def render(name: str) -> None:
        ask = ChatAsk(messages=[{"role": "user", "content": name}])
        texts.extend(template.render(ask).text for _ in range(5))

    threads = [threading.Thread(target=render, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(str(index) for index in range(4) for _ in range(5))


# -- the metered environment computes what jinja2's own computes -----------------------------------

values = st.sampled_from(
    [
        "'ab'",
        "'%s-%5.1f'",
        "'{}|{:>5}'",
        "''",
        "3",
        "0",
        "-2",
        "2.5",
        "[1, 2]",
        "['b', 'a']",
        "{'k': 'v'}",
        "none",
        "true",
    ]
)
operators = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"])
FILTERS = (
    "upper;length;list;join(',');first;default('d');string;trim;indent(3, true);replace('a', 'xy');center(7);"
    "round(1);int;float;sort;unique | list;batch(2) | list;slice(2) | list;map('string') | list;max;sum;abs;"
    "reverse | list;format(1, 2.5);select | list;items | list;dictsort;truncate(1);e;safe;last;title"
)
METHODS = (
    "upper();split('a');replace('a', 'b');center(6, '*');join(['x', 'y']);format(1, 'z');zfill(5);get('k');"
    "items() | list;strip();startswith('a');splitlines();expandtabs(4);index(1)"
)
filters = st.sampled_from(FILTERS.split(";"))
methods = st.sampled_from(METHODS.split(";"))


@settings(max_examples=200)
@given(values, operators, values, filters, methods)
def test_expressions_mean_what_they_mean_in_jinja2(left, operator, right, filter_name, method):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for expression in (
        f"{left} {operator} {right}",
        f"{left} | {filter_name}",
        f"({left}).{method}",
        f"{left}[:1]",
    ):
        # A variable keeps jinja2 from folding constants, which has its own mistakes ({{ 3[:1] }} is empty).
        source = (
            "{% set v = " + left + " %}{{ v" + expression.replace(f"({left})", left, 1)[len(left) :] + " }}"
        )
        try:
            expected = plain.from_string(source).render()
        except Exception:  # whatever jinja2 makes of it, ours is an error too
            with pytest.raises(QuireError):
                ChatTemplate(source).render(ASK)
        else:
            if "object at" not in expected:
                assert ChatTemplate(source).render(ASK).text == expected
