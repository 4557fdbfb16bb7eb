"""Rollouts by the notebooks' names: every hook, how far it reaches, and the slips that the notebooks had."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlkit import (
    Environment,
    Generation,
    GenerationConfig,
    Rollout,
    Step,
    Task,
    TextGeneration,
    assign_rewards,
    check_termination_conditions,
    create_batch_rollouts,
    create_environment,
    create_grpo_config,
    create_multiturn_rollout,
    create_random_termination,
    create_reference_model,
    create_rollout,
    early_or_long,
    execute_step,
    generate_text,
    get_rollout_summary,
    initial_prompts,
    initialize_rollouts,
    run_rollouts,
    stack_rollouts,
    train_model,
    training_iteration,
    update_policy,
)
from rlkit.environments import continue_with_step
from rlkit.errors import EnvironmentFailed
from rlkit.models import make_policy
from rlkit.notebook.data import TRAINING

SHORT = TRAINING._replace(max_new_tokens=6)
PROMPTS = ["What is 2 + 3?", "What is 10 - 4?"]


@pytest.fixture
def model(tiny):
    return tiny.model.eval()


@pytest.fixture
def tokenizer(tiny):
    return tiny.renderer.tokenizer


def says(tiny, *texts, end=True):
    """An engine that says the texts in turn, each to every episode that waits, and keeps the sizes of its batches."""
    sizes = []

    def engine(policy, contexts, seeds, params):
        text = texts[min(len(sizes), len(texts) - 1)]
        sizes.append(len(contexts))
        ids = tiny.renderer.tokenizer.encode(text + "<|im_end|>" * end, add_special_tokens=False)
        return [Generation(tuple(ids), (-0.5,) * len(ids), "stop" if end else "length") for _ in contexts]

    engine.sizes = sizes
    return engine


def lookup(city: str) -> str:
    """Looks a city up.

    Args:
        city: The city.
    """
    return f"{city} is warm"


CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_batches_are_batches(tiny, model, tokenizer):
    """The slip: batches loop one by one. Rollouts of a prompt stand side by side, and siblings share no list."""
    engine = says(tiny, "a", "b", "c")
    rollouts = create_batch_rollouts(
        model, tokenizer, PROMPTS, num_rollouts=2, max_turns=3, generate=engine, prompt_generator_fn=continue_with_step
    )
    assert engine.sizes == [4, 4, 4] and [(r.group, r.sample) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [m["content"] for m in rollouts[3].conversation] == [PROMPTS[1], "a", "Continue with step 1.", "b", "Continue with step 2.", "c"]
    rollouts[0].conversation.append({"role": "user", "content": "x"})
    assert len(rollouts[1].conversation) == 6


def test_turns_are_replies_and_all_of_them_are_trained(tiny, model, tokenizer):
    """The slips: a stop after 10 messages called 5 turns; only the last generation is trained."""
    rollout = create_multiturn_rollout(
        model, tokenizer, PROMPTS[0], prompt_generator_fn=continue_with_step, generate=says(tiny, "ab"), config=SHORT
    )
    assert rollout.total_steps == 5 and (rollout.status, rollout.truncation) == ("truncated", "steps")
    assert int(stack_rollouts([rollout]).response_mask.sum()) == rollout.response_length == 5 * len(rollout.steps[0].response_ids)


def test_results_of_tools_are_the_templates_own(tiny, model, tokenizer):
    """The slip: no chat template, and tool results as a user's text. Parser and executor are called, and calls stand once."""
    parsed, executed = [], []

    def tool_parser(text):
        parsed.append(text)
        return [{"id": "x", "type": "function", "function": {"name": "find", "arguments": '{"city": "Rome"}'}}] if "find" in text else []

    def tool_executor(call):
        executed.append(call)
        return "warm <|im_end|>"

    settings = {"generate": says(tiny, "find it", "It is warm."), "config": SHORT}
    rollout = create_multiturn_rollout(model, tokenizer, "Weather?", tool_parser=tool_parser, tool_executor=tool_executor, **settings)
    assert parsed == ["find it", "It is warm."] and rollout.text == "It is warm." and rollout.terminated_early
    assert executed == [{"id": "call_0", "type": "function", "function": {"name": "find", "arguments": {"city": "Rome"}}}]
    assert [m["role"] for m in rollout.conversation] == ["user", "assistant", "tool", "assistant"]
    context = rollout.steps[1].prompt_ids
    assert "<tool_response>\nwarm <|im_end|>\n</tool_response>" in tokenizer.decode(context) and context.count(761) == 3
    settings["generate"] = says(tiny, CALL, "Done.")
    rollout = create_multiturn_rollout(model, tokenizer, "Weather?", tools=[lookup], **settings)
    assert rollout.steps[0].tool_results[0].content == "Rome is warm" and rollout.steps[0].content == ""
    settings["generate"] = says(tiny, CALL, "Done.")
    failing = create_multiturn_rollout(model, tokenizer, "?", tools=[lookup], tool_executor=lambda call: 1 / 0, **settings)
    assert not failing.steps[0].tool_results[0].ok and "ZeroDivisionError" in failing.steps[0].tool_results[0].content


def test_conditions_end_an_episode_as_terminated(tiny, model, tokenizer):
    seen = []

    def stop_condition(conversation):
        seen.append(len(conversation))
        return len(conversation) >= 4

    def termination_fn(rollout, last_step):
        assert last_step is rollout.steps[-1]
        return "DONE" in last_step.content

    settings = {"prompt_generator_fn": continue_with_step, "config": SHORT}
    rollout = create_multiturn_rollout(model, tokenizer, "Go", stop_condition=stop_condition, generate=says(tiny, "a"), **settings)
    assert seen == [2, 4] and rollout.terminated_early and rollout.termination_step == 1
    rollout = create_multiturn_rollout(
        model, tokenizer, "Go", termination_fn=termination_fn, generate=says(tiny, "a", "b", "DONE"), **settings
    )
    assert rollout.total_steps == 3 and rollout.terminated_early
    nothing = create_multiturn_rollout(
        model, tokenizer, "Go", prompt_generator_fn=lambda r, step: None if step else "on", generate=says(tiny, "a"), config=SHORT
    )
    assert nothing.total_steps == 2 and nothing.terminated_early
    assert not check_termination_conditions(rollout) and check_termination_conditions(rollout, termination_fn)


def test_a_generator_is_asked_with_the_conversation(tiny, model, tokenizer):
    """It gets text where there is one message, else messages; its reply ends at its end token, and is scored where it has no log-probs."""
    seen = []
    good = tokenizer.encode("yes<|im_end|>", add_special_tokens=False)

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        seen.append((prompt, config, compute_logprobs))
        ids = torch.tensor([*good, 5, 6])
        return TextGeneration("yes", ids, None, ids != 6)

    rollout = create_multiturn_rollout(
        model, tokenizer, "Go", generator=generator, prompt_generator_fn=continue_with_step, max_turns=2, config=SHORT
    )
    assert seen[0] == ("Go", SHORT, True) and [m["content"] for m in seen[1][0]] == ["Go", "yes", "Continue with step 1."]
    step = rollout.steps[1]
    assert step.response_ids == tuple(good) and step.finish_reason == "stop"
    with torch.no_grad():
        logits = model(torch.tensor([[*step.prompt_ids, *good]])).logits[0, len(step.prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(good)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(step.logprobs), expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="without a token"):
        create_rollout(model, tokenizer, "Go", generator=lambda *_: TextGeneration("", ()))


def test_the_reference_scores_what_the_policy_sampled(model, tokenizer):
    """The slip: the reference scores a sample of its own. The reward stays as it is."""
    ref = create_reference_model(model)
    same = create_rollout(model, tokenizer, PROMPTS[0], config=SHORT, ref_model=ref, reward_fn=lambda r: 1.0)
    assert same.kl_penalty == pytest.approx(0, abs=1e-6) and same.reward == 1.0
    ref.lm_head.weight.data *= 0.5
    seen = []

    def kl_fn(policy_logprobs, ref_logprobs, mask):
        seen.append((policy_logprobs, ref_logprobs))
        return (policy_logprobs - ref_logprobs).sum(1)

    moved = create_rollout(model, tokenizer, PROMPTS[0], config=SHORT, ref_model=ref, kl_fn=kl_fn)
    torch.testing.assert_close(seen[0][0][0], torch.tensor(moved.steps[0].logprobs), rtol=0, atol=1e-4)
    assert moved.kl_penalty == pytest.approx(float((seen[0][0] - seen[0][1]).sum())) and abs(moved.kl_penalty) > 1e-3
    with pytest.raises(ValueError, match="no ref_model"):
        create_rollout(model, tokenizer, PROMPTS[0], kl_fn=kl_fn)


def test_the_parts_of_the_manager_are_those_of_the_whole(model, tokenizer):
    """initialize_rollouts and execute_step until all are over give what run_rollouts gives; a finished rollout stays as it is."""
    settings = {"prompt_generator_fn": continue_with_step, "max_steps": 2}
    whole = run_rollouts(model, tokenizer, initial_prompts, n=3, num_rollouts=2, config=SHORT, seed=5, **settings)
    policy = make_policy(model, tokenizer)
    turns = initialize_rollouts(policy, initial_prompts, 3, environment=create_environment(**settings), num_rollouts=2, seed=5)
    while not all(isinstance(turn, Rollout) for turn in turns):
        turns = execute_step(policy, turns, SHORT)
    assert [r.steps for r in turns] == [r.steps for r in whole] and execute_step(policy, turns, SHORT) == turns
    assert len({r.steps[0].response_ids for r in whole[:2]}) == 2  # samples of one prompt differ
    with pytest.raises(ValueError, match="needs n"):
        initialize_rollouts(policy, initial_prompts, environment=create_environment())
    with pytest.raises(ValueError, match="knows nothing of system_prompt"):
        create_rollout(model, tokenizer, "Go", environment=create_environment(), system_prompt="S")
    with pytest.raises(TypeError, match="rewardfn"):
        create_rollout(model, tokenizer, "Go", rewardfn=early_or_long)


class Counter:
    """A session that counts its replies, and keeps when it was opened and closed."""

    def __init__(self, task, log):
        self.task, self.log, self.replies, self.tools = task, log, 0, {}

    async def __aenter__(self):
        self.log.append(("open", self.task.id))
        return self

    async def __aexit__(self, *error):
        await asyncio.sleep(0)
        self.log.append(("close", self.task.id, self.replies))

    def first_prompt(self):
        return self.task.messages

    def answer(self, rollout):
        self.replies += 1
        if self.replies == 2 and "fails" in self.task.id:
            raise KeyError("gone")
        return rollout, None if self.replies == 2 else [{"role": "user", "content": "On."}]


@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_by_parts_keeps_its_session_until_it_is_over(fails, tiny, model, tokenizer):
    """Also in an event loop, as a notebook has one; and where one episode fails, the sessions of the others are closed."""
    log: list = []
    environment = Environment(session=lambda task: Counter(task, log), max_steps=5)
    tasks = [Task("a", ({"role": "user", "content": "Go"},)), Task("b fails" if fails else "b", ({"role": "user", "content": "Go"},))]
    policy, engine = make_policy(model, tokenizer), says(tiny, "x")

    async def cells():
        turns = initialize_rollouts(policy, tasks, environment=environment)
        turns = execute_step(policy, turns, SHORT, generate=engine)
        assert [len(turn.rollout.steps) for turn in turns] == [1, 1] and [m["content"] for m in turns[0].prompt] == ["On."]
        assert [entry[0] for entry in log] == ["open", "open"] and engine.sizes == [2]
        return execute_step(policy, turns, SHORT, generate=engine)

    if fails:
        with pytest.raises(EnvironmentFailed, match="KeyError: 'gone'"):
            asyncio.run(cells())
    else:
        assert [rollout.total_steps for rollout in asyncio.run(cells())] == [2, 2]
    assert sorted(log[2:]) == [("close", "a", 2), ("close", tasks[1].id, 2)]


def test_the_examples_and_the_summary():
    step = Step((), (1,), (2,), (-1.0,), "stop", content="so")
    early = Rollout(Task("t", ()), (step,) * 3)
    full = early._replace(steps=(step,) * 5, status="truncated", truncation="steps", sample=1)
    rollouts = assign_rewards([early, full, early], early_or_long)
    assert [r.reward for r in rollouts] == [1.5, 15.0, 1.5]
    summary = get_rollout_summary([*rollouts, full])
    assert summary == {
        "total_rollouts": 4, "average_steps": 4.0, "min_steps": 3, "max_steps": 5, "early_terminations": 2, "average_reward": 6.0,
        "step_distribution": {3: 2, 5: 2}, "rewards": [1.5, 15.0, 1.5, None],
    }  # fmt: skip
    ends = create_random_termination(0.1, seed=4)
    drawn = [ends(early._replace(group=i), step) for i in range(4000)]
    assert drawn == [create_random_termination(0.1, seed=4)(early._replace(group=i), step) for i in range(4000)]
    assert abs(sum(drawn) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5  # four standard deviations, of one fixed seed
    assert create_random_termination(0.0)(early, step._replace(content="DONE")) and not create_random_termination(0.0)(early, step)
    assert len(set(initial_prompts(4))) == 4 and initial_prompts(5)[4] == initial_prompts(1)[0]


def test_training_takes_the_same_hooks(tiny, tokenizer, model):
    """training_iteration and train_model pass the hooks of rollouts on, also to a model that a model_loader gives."""
    import copy

    seen = {"loader": [], "template": [], "stop": [], "prompt": []}
    ours = copy.deepcopy(model)

    def template_fn(prompt, *_):
        seen["template"].append(prompt)
        text = prompt if isinstance(prompt, str) else " ".join(m["content"] for m in prompt)
        return f"Q: {text}\nA:"

    hooks = {
        "generate": says(tiny, "a"),
        "template_fn": template_fn,
        "stop_condition": lambda conversation: seen["stop"].append(len(conversation)),
        "prompt_generator_fn": lambda r, step: seen["prompt"].append(step) or "on",
        "max_steps": 2,
    }
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    config = create_grpo_config(kl_coef=0.0, group_size=2)
    _, rollouts = training_iteration(ours, tokenizer, PROMPTS, optimizer, reward_fn=lambda r: float(r.sample), config=config, **hooks)
    assert [r.total_steps for r in rollouts] == [2] * 4 and seen["template"] and seen["prompt"] == [0] * 4 + [1] * 4
    assert seen["stop"] == [2] * 4 + [4] * 4

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        return generate_text(model, tokenizer, prompt, config, compute_logprobs, seed=len(prompt))

    state, rollouts = training_iteration(
        ours, tokenizer, PROMPTS, optimizer, reward_fn=lambda r: float(r.sample), config=config, generator=generator, max_new_tokens=6
    )
    assert [(r.group, r.reward) for r in rollouts] == [(0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)] and state.metrics["reward"] == 0.5

    def model_loader(model_id, dtype, device_map, use_lora, lora_rank, lora_alpha):
        seen["loader"].append(model_id)
        return ours

    trained, _ = train_model(
        "mine", tokenizer, PROMPTS, lambda r: float(r.sample), model_loader=model_loader, steps=1, batch_size=1, config=config,
        progress=None, **hooks | {"generate": says(tiny, "b")},
    )  # fmt: skip
    assert trained is ours and seen["loader"] == ["mine"]


def test_rollouts_of_another_distribution_are_not_trained_on(model, tokenizer):
    """The sampled and the scored distribution are one: a cut one is refused, and another temperature."""
    config = create_grpo_config(kl_coef=0.0)
    for sampled, words in ((GenerationConfig(max_new_tokens=4), "cut distribution"), (SHORT._replace(temperature=0.5), "temperature=0.5")):
        rollouts = create_batch_rollouts(model, tokenizer, PROMPTS[:1], num_rollouts=2, config=sampled, reward_fn=lambda r: 1.0)
        with pytest.raises(ValueError, match=words):
            update_policy(model, rollouts, torch.optim.SGD(model.parameters(), lr=0.0), config)
