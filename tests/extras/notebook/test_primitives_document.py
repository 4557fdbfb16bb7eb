"""The notebook of primitives itself, where it is at hand: its rewards, hooks and examples, and its
own functions on top of ours."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rlkit.notebook as nb

FOLDER = Path(
    os.environ.get("RLKIT_DOCUMENTS", Path(__file__).resolve().parents[4] / "shared" / "documents")
)
TEXTS = {
    "right": "That is correct. " + "word " * 60,
    "harmful": "dangerous",
    "short": "no",
}
CALL = '<tool name="calculator">15 * 23</tool>'


def cells():
    """The notebook's cells of code, without what follows them as text."""
    found = sorted(FOLDER.glob("002_*.txt"))
    if not found:
        pytest.skip(f"{FOLDER} has no notebook of primitives; name its folder in RLKIT_DOCUMENTS")
    for part in found[0].read_text().split("In [None]:\n")[1:]:
        lines = [re.sub(r"^(!| {14}torch datasets).*", "", line) for line in part.splitlines()]
        for end in range(len(lines), 0, -1):
            try:
                yield ast.parse("\n".join(lines[:end]))
                break
            except SyntaxError:
                pass


def definitions():
    """Name → the definition of every function and type, as it is written."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name: node for cell in cells() for node in cell.body if isinstance(node, kinds)}


def document(*names):
    """A name space of rlkit.notebook with imports of the notebook, and these definitions of its
    own, unmodified."""
    space: dict[str, Any] = {name: getattr(nb, name) for name in nb.__all__}
    imports = [
        node
        for cell in list(cells())[:1]
        for node in cell.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    own = definitions()
    body: Any = [*imports, *(own[name] for name in names)]
    exec(compile(ast.Module(body, []), "the notebook", "exec"), space)
    return space


EXAMPLES = [
    "correctness_reward",
    "safety_reward",
    "helpfulness_reward",
    "vector_reward_fn",
    "adaptive_algorithm_switch",
    "adaptive_ref_update",
    "parse_tool_calls",
    "execute_tool",
    "tool_call_stop_condition",
    "multiturn_tool_reward",
]


@pytest.fixture
def model(tiny):
    torch.manual_seed(0)
    return copy.deepcopy(tiny.model).eval()


@pytest.fixture
def tokenizer():
    return nb.load_tokenizer("tiny")


def saying(tokenizer, *texts):
    """A generator that says the texts in turn."""
    said = iter(texts)

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        text = next(said)
        ids = torch.tensor(tokenizer.encode(text + "<|im_end|>", add_special_tokens=False))
        return nb.Generation(
            text=text, token_ids=ids, logprobs=None, valid_mask=torch.ones(len(ids))
        )

    return generator


@pytest.mark.slow
def test_the_signatures_are_those_of_the_document():
    """Names, order and defaults of parameters and fields; what is added comes after them, or by
    keyword alone."""
    # may be left out here
    defaulted = {
        "gen_config",
        "reward_fn",
        "config",
        "valid_mask",
        "switch_strategy",
        "prompt_mask",
        "pad_token_id",
    }
    own = document(*definitions())
    for name, node in definitions().items():
        if name in EXAMPLES:
            continue
        theirs, ours = (
            list(inspect.signature(f).parameters.values()) for f in (own[name], getattr(nb, name))
        )
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs], name
        for a, b in zip(theirs, ours, strict=False):
            same = a.default == b.default or (a.default in ([], {}) and not b.default)
            assert (
                same
                or (a.default is a.empty and a.name in defaulted)
                or (a.name, b.default) == ("enable_thinking", False)
            ), (name, a, b)
        assert all(
            p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) or p.default is not p.empty
            for p in ours[len(theirs) :]
        ), name
        assert isinstance(node, ast.ClassDef) == isinstance(getattr(nb, name), type)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, vector",
    [("right", [1.0, 1.0, 1.0]), ("harmful", [0.0, 0.0, 0.5]), ("short", [0.0, 1.0, 0.5])],
)
def test_its_vector_reward_scores_our_rollouts(text, vector, model, tokenizer):
    space = document(*EXAMPLES)
    given = model, tokenizer, "hello", nb.GenerationConfig(), space["vector_reward_fn"]
    rollout = nb.create_rollout(*given, generator=saying(tokenizer, TEXTS[text]))
    assert rollout.reward == pytest.approx(
        sum(w * x for w, x in zip((0.5, 0.3, 0.2), vector, strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, given, reward",
    [
        ("length_penalty_reward", (), -0.5),
        ("format_reward", (r"\d+",), 0.0),
        ("exact_match_reward", (lambda prompt: prompt.upper(), str.strip), 1.0),
        ("tool_usage_reward", (1,), 0.0),
    ],
)
def test_its_rewards_score_our_rollouts_as_ours_do(name, given, reward, model, tokenizer):
    make = document(name)[name]
    for fn in (make(*given), getattr(nb, name)(*given)):
        rollout = nb.create_rollout(
            model,
            tokenizer,
            "hello",
            nb.GenerationConfig(),
            fn,
            generator=saying(tokenizer, " HELLO "),
        )
        assert rollout.reward == reward


@pytest.mark.slow
def test_its_tools_are_tracked_over_the_turns(model, tokenizer):
    """Parser, executor, stop condition and reward of the fourth example; the executor reads the
    arguments that the parser found."""
    space = document(*EXAMPLES)
    rollout = nb.create_multiturn_rollout(
        model,
        tokenizer,
        "Solve: 15 * 23 + 17",
        nb.GenerationConfig(),
        space["multiturn_tool_reward"],
        tool_parser=space["parse_tool_calls"],
        tool_executor=space["execute_tool"],
        stop_condition=space["tool_call_stop_condition"],
        generator=saying(tokenizer, CALL, "It is 345, so DONE."),
    )
    roles = [(m.role, m.content) for m in rollout.conversation.messages]
    assert roles == [
        ("user", "Solve: 15 * 23 + 17"),
        ("assistant", CALL),
        ("tool", "Result: 345"),
        ("assistant", "It is 345, so DONE."),
    ]
    assert rollout.conversation.messages[1].tool_calls == (
        {"name": "calculator", "args": "15 * 23"},
    )
    assert rollout.reward == 1.0 and rollout.generation.text == "It is 345, so DONE."


@pytest.mark.slow
def test_its_switch_and_its_updaters_act_in_training(model, tokenizer):
    """adaptive_ref_update takes the step's KL as kl_value, which the document's own loop never
    passes."""
    space = document(*EXAMPLES)
    configs = [
        nb.get_algorithm_config(step, space["adaptive_algorithm_switch"]).algorithm
        for step in (0, 49, 50)
    ]
    assert configs == ["grpo", "grpo", "dapo"]
    ref = nb.create_reference_model(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = nb.GenerationConfig(16, 1.0, 1.0, 0)
    update = space["adaptive_ref_update"](kl_threshold=1e-4)
    state = nb.training_iteration(
        model,
        tokenizer,
        ["a", "b"],
        config,
        nb.create_grpo_config(),
        lambda r: len(r.generation.text),
        optimizer,
        ref,
        update,
    )
    assert state.metrics["kl"] > 1e-4 and torch.equal(ref.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:compute_advantages")
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_its_own_loop_runs_on_our_functions(algorithm, model, tokenizer, tmp_path):
    """The bodies of its rollouts, its iteration and its training, as they are written, with every
    call in them."""
    space = document(
        "create_rollout",
        "create_multiturn_rollout",
        "create_batch_rollouts",
        "training_iteration",
        "train",
    )
    space |= {
        "load_model": lambda name, use_lora: model,
        "GenerationConfig": lambda **numbers: nb.GenerationConfig(max_new_tokens=4),
    }
    space["tqdm"] = type(
        "bar",
        (list,),
        {
            "__init__": lambda self, it, desc: list.__init__(self, it),
            "set_postfix": lambda self, d: None,
        },
    )
    before = model.lm_head.weight.detach().clone()
    space["train"](
        "tiny",
        ["a"],
        lambda r: len(r.generation.text),
        2,
        4,
        algorithm,
        1e-3,
        output_dir=str(tmp_path),
    )
    assert not torch.equal(before, model.lm_head.weight)
    short = nb.GenerationConfig(max_new_tokens=4)
    rollout = space["create_multiturn_rollout"](
        model, tokenizer, "hi", short, lambda r: 1.0, 2, lambda text: [{"name": "f"}], str
    )
    assert len(rollout.conversation.messages) == 5 and rollout.reward == 1.0


@pytest.mark.slow
def test_its_creative_cells_run(tokenizer):
    """Every cell of examples from top to bottom, apart from its prints."""
    space: dict[str, Any] = document()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in list(cells())[9:]:
            exec(compile(cell, "the notebook", "exec"), space)
    assert (
        callable(space["ref_update_fn"])
        and callable(space["ref_update_fn_periodic"])
        and callable(space["truncated_kl_fn"])
    )
