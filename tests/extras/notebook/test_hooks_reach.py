"""The hooks of inner functions reach through every function that plays episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit import notebook
from rlkit.notebook import GenerationConfig, create_grpo_config

SHORT = GenerationConfig(max_new_tokens=6)
MODEL = notebook.load_model("tiny", dtype="float32", device_map="cpu")
TOKENIZER = notebook.load_tokenizer("tiny")
PROMPTS = ["What is 1 + 1?", "What is 2 + 3?"]


def iterate(reward_fn: Any, **hooks: Any) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.0)
    config = create_grpo_config()._replace(group_size=2, kl_coef=0.0)
    notebook.training_iteration(
        MODEL, TOKENIZER, PROMPTS, SHORT, config, reward_fn, optimizer, **hooks
    )


def run(reward_fn: Any, **hooks: Any) -> None:
    folder = hooks.pop("folder")
    notebook.train(
        MODEL,
        PROMPTS,
        reward_fn,
        1,
        output_dir=folder,
        gen_config=SHORT,
        tokenizer=TOKENIZER,
        save_every=0,
        learning_rate=0.0,
        **hooks,
    )


PLAYERS = {
    "create_rollout": lambda reward_fn, **hooks: notebook.create_rollout(
        MODEL, TOKENIZER, PROMPTS[0], SHORT, reward_fn, **hooks
    ),
    "create_multiturn_rollout": lambda reward_fn, **hooks: notebook.create_multiturn_rollout(
        MODEL, TOKENIZER, PROMPTS[0], SHORT, reward_fn, **hooks
    ),
    "create_batch_rollouts": lambda reward_fn, **hooks: notebook.create_batch_rollouts(
        MODEL, TOKENIZER, PROMPTS, SHORT, reward_fn, **hooks
    ),
    "training_iteration": iterate,
    "train": run,
}


@pytest.mark.parametrize("name", PLAYERS)
@pytest.mark.filterwarnings("ignore:training samples", "ignore:kl_coef")
def test_a_template_and_tools_reach_every_function_that_plays(name, tmp_path):
    """The policy reads the template's text, and the reward function gets the prompt itself."""
    read, rewarded, results, stopped = [], [], [], []
    reply = torch.tensor([*TOKENIZER.encode("ok"), TOKENIZER.eos_token_id])

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        read.append(prompt)
        return notebook.Generation("ok", reply, torch.zeros(len(reply)), torch.ones(len(reply)))

    def template_fn(prompt, tokenizer, use_chat_template, system_prompt, enable_thinking):
        return f"<|im_start|>user\n{prompt.upper()}<|im_end|>\n<|im_start|>assistant\n"

    def tool_executor(call):
        results.append(call["name"])
        return "2"

    def stop_condition(conversation):
        stopped.append(conversation.messages[0].content)
        return len(conversation.messages) > 3

    def reward_fn(rollout):
        rewarded.append(rollout)
        return 1.0

    folder = {"folder": tmp_path} if name == "train" else {}
    PLAYERS[name](
        reward_fn,
        generator=generator,
        template_fn=template_fn,
        tool_parser=lambda text: [{"name": "add", "args": {"a": 1}}],
        tool_executor=tool_executor,
        stop_condition=stop_condition,
        max_turns=3,
        **folder,
    )
    assert all(text.startswith("<|im_start|>user\nWHAT IS ") for text in read)
    assert {rollout.prompt for rollout in rewarded} <= {*PROMPTS}
    for rollout in rewarded:
        said = rollout.conversation.messages
        assert said[0].content == template_fn(rollout.prompt, None, False, None, False)
        assert [message.role for message in said[1:3]] == ["assistant", "tool"]
    assert set(results) == {"add"} and stopped


def test_hooks_that_would_do_nothing_are_refused():
    with pytest.raises(ValueError, match=r"template_fn .* all prompts as texts"):
        notebook.create_rollout(
            MODEL, TOKENIZER, [{"role": "user", "content": "?"}], template_fn=lambda *given: ""
        )
    for hooks in (
        {"environment": object(), "tool_parser": lambda text: []},
        {"tool_executor": lambda call: ""},
    ):
        with pytest.raises(ValueError, match="tool_parser"):
            notebook.create_rollout(MODEL, TOKENIZER, PROMPTS[0], **hooks)
