"""Which program a reply gives: replies in the style of chat models, CommonMark as the oracle, and
hostile text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from parametrise import each
from rlkit.environments.thinking import split_thinking
from rlkit.rewards import code_exec, extract_code
from rlkit.rewards.fences import split_code_blocks
from rlkit.sandbox import Sandbox
from rlkit.tasks import mbpp
from rlkit.types import Rollout, Step, Task

P = "def f(n):\n    return n + 1"
WRONG = "def f(n):\n    return n"
TESTS = ("assert f(1) == 2", "assert f(2) == 3")


def indented(text: str, by: str) -> str:
    return "\n".join(by + line for line in text.split("\n"))


def strings(separator: str) -> str:
    """Right only if the separator reaches the program as it stands."""
    return f"WIDTH = len('a{separator}b')\ndef f(n):\n    return n + WIDTH - 2"


# name: (reply, the program that must be read); every one of them passes TESTS.
REPLIES = {
    "a python block": (f"Here is the function:\n\n```python\n{P}\n```\n\nIt adds one.", P),
    "python alone": (f"```python\n{P}\n```", P),
    "py": (f"```py\n{P}\n```", P),
    "python3": (f"```python3\n{P}\n```", P),
    "Python 3.11": (f"```Python3.11\n{P}\n```", P),
    "capitals": (f"```PYTHON\n{P}\n```", P),
    "ipython": (f"```ipython3\n{P}\n```", P),
    "attribute": (f"```{{.python}}\n{P}\n```", P),
    "attributes": (f'``` {{.python .numberLines startFrom="1"}}\n{P}\n```', P),
    "braces": (f"```{{python}}\n{P}\n```", P),
    "title": (f'```python title="solution.py"\n{P}\n```', P),
    "file after a colon": (f"```python:solution.py\n{P}\n```", P),
    "highlighted lines": (f"```python {{1,2}}\n{P}\n```", P),
    "file as language": (f"```solution.py\n{P}\n```", P),
    "space before the language": (f"``` python\n{P}\n```", P),
    "space after the opening": (f"```python   \n{P}\n```   ", P),
    "space after an unmarked opening": (f"```  \n{P}\n```", P),
    "tildes": (f"~~~python\n{P}\n~~~", P),
    "unmarked tildes": (f"~~~\n{P}\n~~~\nDone.", P),
    "four backticks": (f"````python\n{P}\n````", P),
    "four backticks around three": (f'````python\n"""\n```\n"""\n{P}\n````', f'"""\n```\n"""\n{P}'),
    "a longer closing fence": (f"```python\n{P}\n`````\nThat is it.", P),
    "unmarked": (f"```\n{P}\n```", P),
    "marked as code": (f"```code\n{P}\n```", P),
    "marked as text": (f"```text\n{P}\n```", P),
    "no block": (P, P),
    "windows": (f"Here:\r\n```python\r\n{P}\r\n```\r\n".replace("\n    ", "\r\n    "), P),
    "bash before": (f"Install it:\n```bash\npip install numpy\n```\nThen:\n```python\n{P}\n```", P),
    "json before": (f'Input:\n```json\n{{"n": 1}}\n```\n```python\n{P}\n```', P),
    "text before": (f"Plan:\n```text\n1. add one\n```\n```python\n{P}\n```", P),
    "unmarked before": (f"For the input\n```\n1\n```\nwe return 2:\n```python\n{P}\n```", P),
    "unmarked wrong before": (f"Not\n```\n{WRONG}\n```\nbut\n```\n{P}\n```", P),
    "output after": (f"```python\n{P}\n```\nOutput:\n```\n2\n```", P),
    "output after an unmarked program": (f"```\n{P}\n```\nOutput:\n```\n2\n3\n```", P),
    "marked output after": (f"```python\n{P}\n```\n```output\n2\n```\n```text\n3\n```", P),
    "console after": (
        f"```python\n{P}\n```\n```pycon\n>>> f(1)\n2\n```\n```python-repl\n>>> f(2)\n3\n```",
        P,
    ),
    "shell after": (f"```python\n{P}\n```\nRun it:\n```sh\npython solution.py\n```", P),
    "usage after": (
        f"```python\n{P}\n```\n### Example\n```python\nassert f(1) == 2\nprint(f(1))\n```",
        P,
    ),
    "usage between": (
        f"```python\n{WRONG}\n```\n```python\nprint(f(1))\n```\nfixed:\n```python\n{P}\n```\n```python\nprint(f(1))\n```",
        P,
    ),
    "a better one after": (
        f"First try:\n```python\n{WRONG}\n```\nThat forgets the 1:\n```python\n{P}\n```",
        P,
    ),
    "an empty one after": (f"```python\n{P}\n```\n```python\n\n```", P),
    "python beats a later unmarked": (f"```python\n{P}\n```\nInstead of\n```\n{WRONG}\n```", P),
    "a lambda": (
        "```python\nf = lambda n: n + 1\n```\n```python\nf(1)\n```",
        "f = lambda n: n + 1",
    ),
    "closing fence glued": (f"```python\n{P}```\nThis adds one.", P),
    "closing fence glued, at the end": (f"```python\n{P}```", P),
    "closing fence glued after a space": (f"```python\n{P} ```\nDone.", P + " "),
    "closing fence glued, then output": (f"```python\n{P}```\nOutput:\n```\n2\n```", P),
    "closing fence glued to a string": (f'```python\n{P}\ns = "a"```\nDone.', f'{P}\ns = "a"'),
    "no closing fence": (f"The function:\n\n```python\n{P}", P),
    "no closing fence, newline": (f"```python\n{P}\n", P + "\n"),
    "no closing fence before the next": (f"```python\n{WRONG}\n\n```python\n{P}\n```", P),
    "prose glued to the closing fence": (f"```python\n{P}\n```This adds one.", P),
    "opening fence behind prose": (f"The function: ```python\n{P}\n```", P),
    "in a list": (f"1. Write it:\n\n   ```python\n{indented(P, '   ')}\n   ```\n\n2. Run it.", P),
    "in a list, four columns": (
        f"1. Write it:\n\n    ```python\n{indented(P, '    ')}\n    ```",
        P,
    ),
    "in a list, eight columns": (
        f"- Steps:\n    - Write it:\n        ```python\n{indented(P, '        ')}\n        ```",
        P,
    ),
    "in a list, tabs": (f"* Write it:\n\t```python\n{indented(P, chr(9))}\n\t```", P),
    "on the line of the list item": (f"- ```python\n{indented(P, '  ')}\n  ```", P),
    "in a list, code at column 0": (f"2. Write it:\n   ```python\n{P}\n   ```", P),
    "in a quotation": ("> ```python\n" + indented(P, "> ") + "\n> ```\n\nDone.", P),
    "code indented in its block": (f"```python\n{indented(P, '    ')}\n```", P),
    "a comment before indented code": (
        f"```python\n# adds\n{indented(P, '  ')}\n```",
        f"# adds\n{P}",
    ),
    "tags": (f"<answer>\n```python\n{P}\n```\n</answer>", P),
    "a fence in a docstring": (
        (
            '```python\ndef f(n):\n    """Adds.\n\n    ```python\n    f(1)\n    ```\n    """\n   '
            " return n + 1\n```"
        ),
        'def f(n):\n    """Adds.\n\n    ```python\n    f(1)\n    ```\n    """\n    return n + 1',
    ),
    "inline code in a comment": (
        f"```python\n{P}  # not ```f(n + 1)```\n```",
        f"{P}  # not ```f(n + 1)```",
    ),
    "a fence in a string": (
        f'```python\nBLOCK = f"""```\n{{1}}\n```"""\n{P}\n```',
        f'BLOCK = f"""```\n{{1}}\n```"""\n{P}',
    ),
    "in a markdown block": (f"```markdown\n# Answer\n```python\n{P}\n```\n```", P),
    "thinking": (f"<think>\n```python\n{WRONG}\n```\nNo.</think>\n```python\n{P}\n```", P),
    "thinking that is right": (f"<think>```python\n{WRONG}\n```\n</think>{P}", P),
    "U+2028 in a string": (f"```python\n{strings(chr(0x2028))}\n```", strings(chr(0x2028))),
    "form feed in a string": (f"```python\n{strings(chr(0x0C))}\n```", strings(chr(0x0C))),
    "\\x1c in a string": (f"```python\n{strings(chr(0x1C))}\n```", strings(chr(0x1C))),
    "U+0085 in a string": (f"```python\n{strings(chr(0x85))}\n```", strings(chr(0x85))),
}


def content(reply: str) -> str:
    return split_thinking(reply)[1]


@each("name", REPLIES)
def test_the_program_of_a_reply_is_found(name):
    reply, program = REPLIES[name]
    assert extract_code(content(reply), {"f"}) == program


@pytest.mark.slow
def test_every_reply_of_the_table_scores_1_in_the_sandbox():
    assert len(REPLIES) >= 40
    task = Task("t/0", (), reward="code_exec", metadata={"tests": TESTS})
    step = Step(prompt=(), prompt_ids=(), response_ids=(), logprobs=(), finish_reason="stop")
    rollouts = [
        Rollout(task, (step._replace(content=content(reply)),)) for reply, _ in REPLIES.values()
    ]
    scores = dict(zip(REPLIES, code_exec(rollouts, sandbox=Sandbox(time_limit=10.0)), strict=True))
    assert {name: score for name, score in scores.items() if score != 1.0} == {}


def test_without_a_name_to_define_the_last_python_block_is_the_program():
    assert extract_code("```python\na\n```\n```python\nb\n```\n```\nc\n```\n```json\nd\n```") == "b"
    assert extract_code("```\na\n```\n```\nb\n```\n```json\nd\n```") == "b"
    assert extract_code("```json\nd\n```") == "```json\nd\n```"  # nothing that can be a program
    assert extract_code("no block") == "no block"


def test_a_name_is_defined_at_the_top_level_only():
    used = "```python\nassert f(1) == 2\nf == 3\n```"
    for definition in ("def f(): pass", "async  def f(): pass", "class f: pass", "f = len"):
        assert extract_code(f"```python\n{definition}\n```\n{used}", {"f"}) == definition
    for other in ("def ff(): pass", "x.f = 1", "class A:\n    def f(self): pass", "def g(f): pass"):
        assert extract_code(f"```python\n{other}\n```\n{used}", {"f"}) == "assert f(1) == 2\nf == 3"


def test_references_of_mbpp_keep_what_only_splitlines_takes_for_a_line_end(tmp_path):
    import json

    rows = [
        {
            "text": "Add.",
            "code": f"S = 'a{c}b'\r\ndef f(n):\r\n  return n + 1\r\n",
            "task_id": i,
            "test_list": [*TESTS, *TESTS],
        }
        for i, c in enumerate("\u2028\x0c\x1c\x85")
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {
        task.id: task.answer
        for task in mbpp(
            path=str(tmp_path), split="train", seed=0, exclude=(), validation=0.0, held_out=0.0
        )
    }
    assert [answers[f"mbpp/train/{i}"] for i in range(4)] == [
        f"```python\nS = 'a{c}b'\ndef f(n):\n  return n + 1\n```" for c in "\u2028\x0c\x1c\x85"
    ]


# ------------------------------------------------------------------------- CommonMark as the oracle

CODE = st.lists(
    st.sampled_from(
        ["x = 1", "def g():", "    return 2", "", "s = '''", "# note", "a`b``c", "\u2028\x0c"]
    ),
    max_size=5,
).map(lambda lines: ["x = 1", *lines])
INFO = st.sampled_from(["", "python", "py", "python title=1", "json", " text ", "{.python}"])
FENCE = st.one_of(
    st.integers(3, 5).map(lambda n: "`" * n), st.integers(3, 5).map(lambda n: "~" * n)
)


@st.composite
def documents(draw) -> str:
    """Prose and closed blocks, at the margin, in list items or in quotations."""
    out = []
    for _ in range(draw(st.integers(0, 4))):
        out += [
            *draw(
                st.lists(
                    st.sampled_from(["Some words.", "- an item", "`inline` code", "# Heading"]),
                    max_size=2,
                )
            ),
            "",
        ]
        fence, info, code = draw(FENCE), draw(INFO), draw(CODE)
        block = [fence + info, *code, fence + draw(st.sampled_from(["", fence[0], "  "]))]
        place = draw(st.sampled_from(["margin", "indented", "list", "quotation"]))
        if place == "indented":
            block = [" " + line for line in block]
        elif place == "list":
            out += ["1. An item:", ""]
            block = ["   " + line for line in block]
        elif place == "quotation":
            block = ["> " + line for line in block]
        out += [*block, ""]
    return "\n".join(out)


@pytest.mark.slow
@given(documents())
def test_well_formed_blocks_are_those_of_commonmark(text):
    tokens = [token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    read = [
        (block.language == "python", block.code.rstrip("\n")) for block in split_code_blocks(text)
    ]
    assert read == [("py" in token.info, token.content.rstrip("\n")) for token in tokens]


# ------------------------------------------------------------------------------------- hostile text

PIECES = st.sampled_from(
    [
        "```",
        "~~~",
        "````",
        "python",
        "\n",
        " ",
        "\t",
        "> ",
        "- ",
        "1. ",
        "x = 1",
        '"""',
        "'",
        "{.",
        "}",
        "\r",
        "\u2028",
        "=",
        ".py",
    ]
)


@pytest.mark.slow
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_text_is_read_and_nothing_is_invented(text):
    for block in split_code_blocks(text):
        assert block.code.strip() and "\r" not in block.code
        for line in block.code.split("\n"):
            assert line in text
    assert extract_code(text, {"f"}) or not text


@pytest.mark.slow
@each(
    "piece",
    [
        "```",
        "```\n",
        "```python\n",
        "``` ",
        "> ",
        "- ",
        "1. ",
        "x```\n",
        "> ```\n",
        "`",
        "~",
        " ",
        "\n",
        "{",
        "=",
        "a.py/",
        "python",
        "~~~{",
        "\t",
    ],
)
def test_hostile_replies_cost_no_more_than_their_length(piece):
    """Processor time, not wall time. A quadratic reader takes seconds for 60 kB every time; a
    collection of garbage is slow once."""

    def seconds(text):
        start = time.process_time()
        extract_code(text, {"f", "g"})
        return time.process_time() - start

    for text in (
        piece * (60_000 // len(piece)),
        "```python\n" + piece * (60_000 // len(piece)),
        "x" * 10 + piece * (60_000 // len(piece)) + "!",
    ):
        assert any(seconds(text) < 0.5 for _ in range(3))
