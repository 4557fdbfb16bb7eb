"""The chat and PPO notebook's classes and functions: each call as the notebook makes it, with the
embedded model."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch

from parametrise import cases
from rlkit.engines import Batched
from rlkit.errors import DataError
from rlkit.models.chat import encode_scaffold
from rlkit.notebook import (
    LLMGenerator,
    RLStepData,
    RLTrainer,
    RolloutData,
    RolloutManager,
    SimpleValueHead,
    StepData,
    ToolUseLLM,
    batch_history,
    calculate,
    compute_advantages_and_returns,
    compute_kl_divergence,
    compute_ppo_loss,
    compute_value_loss,
    create_batch,
    dummy_prompt_generator,
    dummy_reward_function,
    dummy_termination_check,
    execute_tool_call,
    generate_initial_prompts,
    generate_templates,
    get_weather,
    has_tool_call,
    res,
)
from rlkit.types import Generation

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA", "unit":'
    ' "celsius"}}\n</tool_call>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("get_weather", "location"), ("calculate", "expression"))
]


def says(*texts):
    """An engine without a model: it says the texts in turn, each to all chats of a batch."""
    rounds = iter(texts)

    def say(policy, prompts, seeds, params):
        ids = tuple(encode_scaffold(policy.renderer, f"{next(rounds)}<|im_end|>"))
        return [Generation(ids, (-1.0,) * len(ids), "stop")] * len(prompts)

    return Batched(say)


@pytest.fixture
def generator():
    return LLMGenerator("tiny")


# --------------------------------------------------------------------------------------- generation


@pytest.mark.slow
def test_the_generator_gives_the_shapes_of_the_notebook(generator):
    pair = generator.generate(CHAT, max_new_tokens=6)
    assert len(pair) == 2 and all(isinstance(part, str) for part in pair)
    several = generator.generate(
        [CHAT, CHAT], max_new_tokens=6, num_return_sequences=2, temperature=0.9
    )
    assert [len(own) for own in several] == [2, 2] and all(
        len(reply) == 2 for own in several for reply in own
    )
    assert isinstance(
        generator.generate(CHAT, max_new_tokens=4, return_thinking=False, enable_thinking=False),
        str,
    )
    greedy = [generator.generate(CHAT, max_new_tokens=8, temperature=0) for _ in range(2)]
    assert greedy[0] == greedy[1] == generator.generate(CHAT, 8, 0.6, do_sample=False)
    with pytest.raises(ValueError, match="fills the model's context"):
        generator.generate([{"role": "user", "content": "x" * 9999}])


def test_thinking_is_apart_and_without_tags():
    generator = LLMGenerator(
        "tiny", engine=says("<think>15 + 27</think>42", "<think>15 + 27</think>42")
    )
    assert generator.generate(CHAT) == ["15 + 27", "42"]
    assert generator.generate(CHAT, return_thinking=False) == "<think>15 + 27</think>42"
    assert generator._parse_thinking(generator.tokenizer.encode("<think>a</think>b<|im_end|>")) == (
        "a",
        "b",
    )


def test_lists_of_chats(generator):
    assert generate_templates(["a"]) == [{"role": "user", "content": "a"}]
    batch = batch_history(CHAT, ["a", "b"])
    assert [chat[-1]["content"] for chat in batch] == ["a", "b"] and batch[0][0] is not batch[1][0]
    plain, thinking = create_batch([CHAT], 2, [[["t", "c"], ["", "d"]]], include_thinking=True)
    assert [chat[-1] for chat in plain] == [
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert [len(chat) for chat in thinking] == [2, 2]  # the slip: siblings share one list
    assert [chat[-1].get("reasoning_content") for chat in thinking] == ["t", None]
    outputs, plain, thinking = res(
        generator, [CHAT, CHAT], max_new_tokens=4, num_return_sequences=1
    )
    assert [chat[-1]["content"] for chat in plain] == [content for _, content in outputs] and len(
        thinking
    ) == 2


# -------------------------------------------------------------------------------------------- tools


def test_a_conversation_with_tools():
    said = says(
        CALL
        + '<tool_call>{"name": "calculate", "arguments": {"expression": "15 * 27"}}</tool_call>',
        "It is 18.",
    )
    llm = ToolUseLLM("tiny", engine=said)
    result = llm.run(
        messages=CHAT,
        tools=TOOLS,
        tool_implementations={"get_weather": get_weather, "calculate": calculate},
        max_turns=5,
    )
    assert (result["final_response"], result["turns"], len(result["tool_calls"])) == (
        "It is 18.",
        2,
        2,
    )
    assert [m["role"] for m in result["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [m["content"] for m in result["messages"][2:4]] == [
        "The weather in San Francisco, CA is 18°C and sunny",
        "405",
    ]


def test_calls_by_hand():
    llm = ToolUseLLM("tiny")
    (call,) = llm._parse_tool_calls(CALL)
    assert (
        llm.has_tool_call(CALL)
        and not has_tool_call("no call")
        and not has_tool_call(f"<think>{CALL}")
    )
    assert call["function"] == {
        "name": "get_weather",
        "arguments": {"location": "San Francisco, CA", "unit": "celsius"},
    }
    assert (
        llm.execute_tool_call(call, {"get_weather": get_weather})
        == "The weather in San Francisco, CA is 18°C and sunny"
    )
    assert get_weather(
        "London, UK"
    ) == "The weather in London, UK is 55°F and sunny" and "70°F" in get_weather("Rome")
    assert (calculate("15 * 27"), calculate("1 / 4")) == (405, 0.25) and calculate(
        "__import__('os')"
    ).startswith("Error: ")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"a": True}, '{"a": true}'),
        ([1, None], "[1, null]"),
        (405, "405"),
        (None, "null"),
        ("x", "x"),
    ],
)
def test_results_that_are_no_text_become_json(result, text):
    assert (
        execute_tool_call({"function": {"name": "f", "arguments": "{}"}}, {"f": lambda: result})
        == text
    )


# ----------------------------------------------------------------------------------------- rollouts


def managed(generator, n=4, max_steps=3, prompts=dummy_prompt_generator, ends=None):
    manager = RolloutManager(generator, n_rollouts=n, max_steps=max_steps)
    manager.initialize_rollouts(generate_initial_prompts(n))
    manager.run_rollouts(prompt_generator_fn=prompts, termination_fn=ends, max_new_tokens=8)
    manager.assign_rewards(dummy_reward_function)
    return manager


def test_rollouts_are_played_scored_and_summed_up(generator):
    steps = []
    manager = managed(
        generator,
        prompts=lambda rollout, step: steps.append(step) or dummy_prompt_generator(rollout, step),
    )
    assert steps == [0] * 4 + [1] * 4 + [2] * 4  # 0 is the first prompt
    summary = manager.get_rollout_summary()
    assert summary == {
        "total_rollouts": 4,
        "avg_steps": 3,
        "min_steps": 3,
        "max_steps": 3,
        "early_terminations": 0,
        "avg_reward": 13.0,
        "step_distribution": [3] * 4,
        "rewards": [13.0] * 4,
    }
    rollout = manager.rollouts[0]
    assert (
        rollout.is_complete
        and not rollout.terminated_early
        and rollout.termination_step == 3
        and "created_at" in rollout.metadata
    )
    last = rollout.steps[-1]
    assert (last.step_num, last.prompt) == (2, "Continue with step 3") and len(
        last.history_wo_thinking
    ) == 6
    assert (
        isinstance(last, RLStepData)
        and last.tokens[-len(last.response_tokens) :] == last.response_tokens
    )
    assert len(last.logprobs) == len(last.response_tokens) and torch.equal(
        last.logprobs, last.old_logprobs
    )


def test_rollouts_end_early_where_a_hook_says_so():
    texts = ["a", "well, done", "b"]
    manager = managed(LLMGenerator("tiny", engine=says(*texts)), n=1, ends=dummy_termination_check)
    assert (
        manager.rollouts[0].terminated_early
        and manager.rollouts[0].reward == 0.5 * manager.rollouts[0].get_total_steps() <= 1.0
    )
    manager = managed(
        LLMGenerator("tiny", engine=says(*texts)),
        n=1,
        prompts=lambda rollout, step: "go" if step < 1 else None,
    )
    assert manager.rollouts[0].terminated_early and manager.active_rollout_indices == []


def test_thinking_of_every_step_stays_in_one_history():
    """The slip: the history with thinking holds the last step's alone."""
    manager = managed(
        LLMGenerator("tiny", engine=says("<think>1</think>a", "<think>2</think>b")),
        n=1,
        max_steps=2,
    )
    last = manager.rollouts[0].steps[-1]
    assert [
        m["reasoning_content"] for m in last.history_w_thinking if m["role"] == "assistant"
    ] == ["1", "2"]
    assert not any("reasoning_content" in m for m in last.history_wo_thinking)


def test_any_generator_with_the_notebooks_generate_will_do():
    class Echo:
        def generate(self, batch, max_new_tokens, num_return_sequences):
            return [["", chat[-1]["content"]] for chat in batch]

    manager = managed(Echo(), n=2, max_steps=2)
    assert [type(s) for s in manager.rollouts[0].steps] == [StepData] * 2 and manager.rollouts[
        1
    ].steps[1].content == "Continue with step 2"


def test_a_rollout_ends_where_its_context_is_full(generator):
    manager = managed(generator, n=1, prompts=lambda rollout, step: "x" * 9999 if step else "go")
    assert (
        manager.rollouts[0].get_total_steps() == 1
        and manager.rollouts[0].metadata["truncation"] == "context"
    )


@pytest.mark.parametrize("format", ["pickle", "json"])
def test_rollouts_come_back_as_they_were(generator, format, tmp_path):
    """The slip: JSON loads back as plain dicts."""
    manager = managed(generator, n=2)
    manager.save_rollouts(tmp_path / "rollouts", format=format)
    loaded = RolloutManager.load_rollouts(tmp_path / "rollouts", format=format)
    assert [r.to_dict() for r in loaded] == [r.to_dict() for r in manager.rollouts]
    assert isinstance(loaded[0], RolloutData) and isinstance(loaded[0].steps[0], RLStepData)
    assert torch.equal(loaded[0].steps[0].logprobs, manager.rollouts[0].steps[0].logprobs)


def test_a_pickle_that_could_run_something_is_refused(tmp_path):
    (tmp_path / "evil").write_bytes(pickle.dumps(print))
    with pytest.raises(DataError, match=r"builtins\.print"):
        RolloutManager.load_rollouts(tmp_path / "evil")
    with pytest.raises(ValueError, match="choose 'pickle' or 'json'"):
        RolloutManager.load_rollouts(tmp_path / "evil", format="yaml")


# ------------------------------------------------------------------------------------------- losses


def test_advantages_over_steps():
    def rollout():
        steps = [
            RLStepData(i, "", "", "", [], [], values=torch.tensor([9.0, value]))
            for i, value in enumerate((0.5, 0.25))
        ]
        return RolloutData(0, "", steps, reward=1.0)

    (gae := rollout()), (plain := rollout())
    assert compute_advantages_and_returns([gae, RolloutData(1, "")]) is None
    compute_advantages_and_returns([plain], gamma=0.9, use_gae=False)
    last = 1.0 - 0.25
    assert gae.steps[1].advantages == pytest.approx(last) and gae.steps[1].returns == pytest.approx(
        1.0
    )
    assert gae.steps[0].advantages == pytest.approx(0.99 * 0.25 - 0.5 + 0.99 * 0.95 * last)
    assert plain.steps[0].advantages == pytest.approx(0.9 - 0.5) and plain.steps[
        0
    ].returns == pytest.approx(0.9)


def test_the_ppo_loss_of_log_probs():
    new, old, advantages = (
        torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
        torch.full((2, 2), -1.5),
        torch.tensor([1.0, -2.0]),
    )
    loss, stats = compute_ppo_loss(new.requires_grad_(), old, advantages, clip_epsilon=0.2)
    ratio = (new.detach() - old).exp()
    expected = -torch.minimum(
        ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]
    ).mean()
    assert loss.item() == pytest.approx(float(expected)) == stats["policy_loss"]
    assert stats["clipfrac"] == 1.0 and stats["ratio_std"] == pytest.approx(float(ratio.std()))
    assert stats["approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-5)
    loss.backward()
    assert (
        new.grad is not None
        and compute_ppo_loss(new[:1, :1], old[:1, :1], advantages[:1])[1]["ratio_std"] == 0.0
    )


def test_the_value_loss_is_the_whole_square():
    values, returns = (
        torch.tensor([[9.0, 1.0], [9.0, 4.0]], requires_grad=True),
        torch.tensor([3.0, 4.0]),
    )
    loss, stats = compute_value_loss(values, returns, clip_value=False)
    assert loss.item() == 2.0 == stats["value_loss"] and (
        stats["value_mean"],
        stats["returns_mean"],
    ) == (2.5, 3.5)
    assert (
        compute_value_loss(values[..., None], returns)[0].item() == 2.0
    )  # the slip: [B, T, 1] is broadcast
    masked = compute_value_loss(values, returns, mask=torch.tensor([[True, False], [True, True]]))[
        0
    ]
    assert masked.item() == 18.0  # the slip: the last value may be padding
    clipped, _ = compute_value_loss(
        values, returns, clip_value=True, old_values=values + 1.0, clip_epsilon=0.5
    )
    assert clipped.item() == pytest.approx(((1.0 - 3.0) ** 2 + 0.5**2) / 2)
    with pytest.raises(ValueError, match="needs old_values"):
        compute_value_loss(values, returns, clip_value=True)


def test_the_divergence_takes_the_new_log_probs_first():
    assert (
        float(compute_kl_divergence(torch.tensor([-2.0, -1.0]), torch.tensor([-1.0, -1.0]))) == 0.5
    )


# ------------------------------------------------------------------------------------------ trainer


def trainer(**config) -> RLTrainer:
    generator = LLMGenerator("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = SimpleValueHead(generator.model.config.hidden_size)
    short = {
        "policy_lr": 1e-4,
        "value_lr": 1e-3,
        "max_new_tokens": 6,
        "ppo_epochs": 2,
        "max_grad_norm": 1.0,
        "save_interval": 0,
    }
    return RLTrainer(generator.model, generator.tokenizer, head, short | config)


def trained(given: RLTrainer, n: int):
    functions = (
        generate_initial_prompts,
        dummy_reward_function,
        dummy_termination_check,
        dummy_prompt_generator,
    )
    return given.train(*functions, n_iterations=n, n_rollouts_per_iter=4, max_steps=2)


def weights(given: RLTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for net in (given.model, given.value_head) for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("iterations", cases([2, 10], [2]))
def test_iterations_give_curves(iterations, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = trainer(save_interval=iterations // 2)
    before = weights(given)
    rows = trained(given, iterations)
    assert [row["iteration"] for row in rows] == list(range(1, iterations + 1))
    for row in rows:
        stats = row["training_stats"]
        assert all(
            math.isfinite(stats[name])
            for name in ("policy_loss", "value_loss", "total_loss", "approx_kl", "clipfrac")
        )
        assert stats["mismatch/logp_abs_max"] < 1e-3 and stats["ratio/first_mean"] == pytest.approx(
            1.0, abs=1e-4
        )
        assert stats["total_loss"] == pytest.approx(
            stats["policy_loss"] + 0.5 * stats["value_loss"]
        )
    assert not all(map(torch.equal, before, weights(given)))
    assert {p.name for p in tmp_path.iterdir()} == {
        f"checkpoint_iter_{iterations // 2}.pt",
        f"checkpoint_iter_{iterations}.pt",
    }
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for axes, name in zip(figure.subplots(1, 2), ("policy_loss", "value_loss"), strict=True):
        axes.plot(
            [row["iteration"] for row in rows], [row["training_stats"].get(name, 0) for row in rows]
        )
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_checkpoint_holds_both_networks_and_both_optimizers(tmp_path):
    """A trainer that starts from it goes on bit for bit."""
    first, second = trainer(), trainer()
    trained(first, 2)
    first.save_checkpoint(tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    nets = {
        "model_state_dict",
        "value_head_state_dict",
        "policy_optimizer_state_dict",
        "value_optimizer_state_dict",
    }
    assert (
        nets | {"training_stats", "config"} <= saved.keys()
        and saved["value_optimizer_state_dict"]["state"]
    )
    trained(first, 1)
    second.load_checkpoint(tmp_path / "checkpoint.pt")
    assert len(trained(second, 1)) == 3 and all(map(torch.equal, weights(first), weights(second)))
    for a, b in zip(first.training_stats, second.training_stats, strict=True):
        assert a["training_stats"]["loss/policy"] == b["training_stats"]["loss/policy"]


def test_replies_with_values_of_a_list_of_chats():
    """The slips: 33 tokens where 5 were asked for, and zeros for values."""
    given = trainer()
    outputs, logprobs, values, tokens = given.generate_with_values(
        [CHAT, [{"role": "user", "content": "And a longer question?"}]], 5
    )
    assert len(outputs) == 2 and all(len(pair) == 2 for pair in outputs)
    assert [len(x) for x in logprobs] == [len(x) for x in values] == [
        len(x) for x in tokens
    ] and max(map(len, tokens)) <= 5
    assert all(v.abs().sum() > 0 for v in values)


@pytest.mark.slow
def test_the_advantages_of_the_steps_are_what_a_step_learns_from():
    """With equal ones there is nothing to learn; what the notebook's function writes may be
    replaced."""
    given = trainer()
    manager = managed(given.generator, n=2, max_steps=2)
    given.add_values(manager.rollouts)
    compute_advantages_and_returns(manager.rollouts)
    assert all(step.values.shape == (1,) for rollout in manager.rollouts for step in rollout.steps)
    for step in (step for rollout in manager.rollouts for step in rollout.steps):
        step.advantages = 1.0
    before = [p.detach().clone() for p in given.model.parameters()]
    stats = given.train_step(manager.rollouts, n_epochs=1, batch_size=32)
    assert (
        all(map(torch.equal, before, given.model.parameters()))
        and stats["policy_loss"] == 0.0
        and stats["value_loss"] > 0
    )
    assert given.train_step([RolloutData(0, "")]) == {}


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="config: there is no learning_rate"):
        trainer(learning_rate=1e-5)


@pytest.mark.slow
def test_the_rows_are_plain_numbers():
    rows = trained(trainer(), 1)
    assert json.loads(json.dumps(rows))[0]["rollout_summary"]["total_rollouts"] == 4
