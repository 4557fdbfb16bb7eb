"""A chat template from a stranger: a program that ends, whatever it does."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest

from parametrise import cases
from rlkit.errors import TemplateError
from rlkit.models import confined as limits
from rlkit.models import load_policy
from rlkit.models.chat import check_template, continuation, encode_prompt, encode_reply
from rlkit.models.confined import TemplateProcess, confine_template

ASKED = [{"role": "user", "content": "Who are you?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


@pytest.fixture(scope="module")
def policy():
    return confine_template(partial(load_policy, path="tiny"))(device="cpu")


@pytest.fixture
def template(policy):
    """Gives what a template makes of a question."""
    before = policy.renderer.tokenizer.chat_template

    def ask(text):
        policy.renderer.tokenizer.chat_template = text
        return encode_prompt(policy.renderer, ASKED)

    yield ask
    policy.renderer.tokenizer.chat_template = before


@pytest.mark.slow
def test_it_renders_the_same(policy, tiny):
    """Prompts, tools, what follows a reply, and a given reply; with thinking and without."""
    dialogue = [
        *ASKED,
        {"role": "assistant", "content": "Nobody.", "reasoning_content": "Hm."},
        {"role": "user", "content": "«Why»?"},
    ]
    assert encode_prompt(policy.renderer, dialogue, TOOLS) == encode_prompt(
        tiny.renderer, dialogue, TOOLS
    )
    assert continuation(policy.renderer, ASKED, 3) == continuation(tiny.renderer, ASKED, 3)
    assert encode_reply(policy.renderer, {"role": "assistant", "content": "Me."}) == encode_reply(
        tiny.renderer, {"role": "assistant", "content": "Me."}
    )
    check_template(policy.renderer, TOOLS)
    load = partial(load_policy, path="tiny", tools="prompt")
    ours, theirs = confine_template(load)(device="cpu"), load()
    assert encode_prompt(ours.renderer, dialogue, TOOLS) == encode_prompt(
        theirs.renderer, dialogue, TOOLS
    )
    assert confine_template(partial(load_policy, path="tiny")).keywords == {"path": "tiny"}


HOSTILE = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a product": "{{ messages[0].role * 10**11 }}",
    "a product at compilation": "{{ 'a' * 10**11 }}",
    "a power at compilation": "{{ 10 ** (10 ** 9) }}",
    "doubling": (
        "{% set n=namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{%"
        " endfor %}"
    ),
    "white space": "{{ 'a'.ljust(10**11) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a new format": "{{ '{:>100000000000}'.format(1) }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    "a list": "{% set l = [1] * 10**10 %}",
    "a long text": "{% for a in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(HOSTILE, ["a product", "a long text"]))
def test_a_hostile_template_is_stopped(kind, template, policy):
    """It held the process for ever, or took the machine's memory."""
    began = time.perf_counter()
    with pytest.raises(
        TemplateError, match=r"was stopped: one prompt took more than 2 s .* do not use its model"
    ):
        template(HOSTILE[kind])
    assert time.perf_counter() - began < limits.PATIENCE
    assert template("{{ messages[0].content }}")  # the next one is answered


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, said",
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_what_a_template_raises_is_said(text, said, template):
    with pytest.raises(TemplateError, match=f"the chat template of '.*' fails: .*{said}"):
        template(text)


def test_a_process_that_says_nothing_is_ended(policy, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE", 0.2)
    asked = TemplateProcess(policy.renderer.tokenizer, {})
    asked.process = limits._start_child()
    os.kill(asked.process.pid, signal.SIGSTOP)
    process = asked.process
    with pytest.raises(TemplateError, match="was stopped"):
        asked.render(ASKED, ())
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_the_process_has_none_of_the_variables_and_ends_with_its_owner(policy, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-x")
    asked = TemplateProcess(policy.renderer.tokenizer, {})
    asked.render(ASKED, ())
    process = asked.process
    with open(f"/proc/{process.pid}/environ") as file:
        assert "MY_KEY" not in file.read()
    del asked
    assert process.wait(10) is not None
