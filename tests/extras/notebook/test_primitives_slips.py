"""What the notebook of primitives gets wrong and rlkit.notebook does not; and its page."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

import rlkit
import rlkit.notebook as nb
from rlkit.extras import notebook
from rlkit.rewards import batched

ROOT = Path(__file__).resolve().parents[3]
FULL = nb.GenerationConfig(8, 1.0, 1.0, 0)


@pytest.fixture
def model(tiny):
    torch.manual_seed(0)
    return copy.deepcopy(tiny.model).eval()


@pytest.fixture
def tokenizer():
    return nb.load_tokenizer("tiny")


def rollout(reward, logprobs, prompt="p", kl_penalty=0.0):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    generation = nb.Generation(
        "", torch.ones(len(logprobs), dtype=torch.int64), logprobs, torch.ones(len(logprobs))
    )
    return nb.Rollout(prompt, generation, reward, kl_penalty)


def test_every_name_of_the_page_is_there():
    rows = [
        row
        for row in (ROOT / "docs/notebooks.md").read_text().splitlines()
        if row.startswith("| `")
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    held = [nb, nb.ToolUseLLM, nb.RolloutManager, nb.RLTrainer]  # the page names methods as well
    assert (
        len(named) > 40
        and sorted(name for name in named if not any(hasattr(home, name) for home in held)) == []
    )


def test_the_notebooks_names_are_known_in_their_room_alone():
    """Nothing outside the extra uses the shape of the documents' rollouts; the lazy
    `rlkit.__getattr__` and rlkit/notebook.py know its names."""
    shape = re.compile(
        r"\.(generation\.(text|token_ids|valid_mask|logprobs)|kl_penalty|conversation\.messages)\b|rlkit\.notebook\."
    )
    outside = [f for f in (ROOT / "rlkit").rglob("*.py") if "notebook" not in f.parts]
    assert [f for f in outside if shape.search(f.read_text())] == []
    assert not {"generation", "kl_penalty", "text", "terminated_early", "to_dict"} & {
        *dir(rlkit.types.Rollout)
    }
    assert rlkit.create_rollout is nb.create_rollout and "create_rollout" not in dir(rlkit)


def test_the_forwarding_module_gives_the_names_of_the_extra():
    space = {}
    exec("from rlkit.notebook import *", space)
    assert set(space) >= set(nb.__all__) == set(dir(nb)) == set(notebook.__all__)
    assert all(space[name] is getattr(notebook, name) for name in nb.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = nb.nothing


def test_advantages_compare_rollouts_of_one_prompt_by_their_task_reward():
    """Four prompts shared one mean, and a KL penalty turned equal rewards into advantages."""
    given = [
        rollout(1.0, [-1.0], "a"),
        rollout(0.0, [-1.0, -1.0], "a"),
        rollout(5.0 - 0.3, [-1.0], "b", 0.3),
        rollout(5.0, [-1.0], "b"),
    ]
    found = nb.compute_advantages(given, normalize=False)
    torch.testing.assert_close(
        found, torch.tensor([[0.5, 0.0], [-0.5, -0.5], [-0.3, 0.0], [0.0, 0.0]])
    )
    with pytest.warns(UserWarning, match="each prompt has one rollout"):
        assert not nb.compute_advantages(
            [rollout(1.0, [-1.0], "a"), rollout(0.0, [-1.0], "b")]
        ).any()
    unscored = nb.compute_advantages(
        [rollout(None, [-1.0]), rollout(1.0, [-1.0]), rollout(0.0, [-1.0])], normalize=False
    )
    assert unscored[:, 0].tolist() == [0.0, 0.5, -0.5]


def test_pairs_skip_ties_and_other_prompts():
    """Ties were trained, and pairs of two prompts; without a pair the loss crashed."""
    pair = [rollout(1.0, [-1.0], "a"), rollout(0.0, [-3.0], "a"), rollout(9.0, [-9.0], "b")]
    loss = nb.compute_dapo_loss(pair, beta=0.5)
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(torch.tensor(1.0)).item())
    tie = [rollout(1.0, [-1.0]), rollout(1.0, [-2.0])]
    nothing = nb.compute_dapo_loss(tie, pair_selector=lambda rollouts: [(0, 1)])
    nothing.backward()
    assert nothing.item() == 0 and tie[0].generation.logprobs.grad.item() == 0


def test_losses_leave_out_what_a_mask_leaves_out():
    masked = rollout(1.0, [-1.0, float("nan")])
    masked = masked._replace(
        generation=masked.generation._replace(valid_mask=torch.tensor([1.0, 0.0]))
    )
    loss = nb.compute_policy_gradient_loss([masked], torch.tensor([[2.0, 2.0]]))
    loss.backward()
    assert loss.item() == 2.0 and masked.generation.logprobs.grad.tolist() == [-2.0, 0.0]
    assert (
        nb.compute_ppo_loss(
            [masked], torch.tensor([[-1.0, 0.0]]), torch.tensor([[2.0, 2.0]])
        ).item()
        == -2.0
    )


def test_a_prompt_of_format_prompt_is_read_as_the_template_writes_it(model, tokenizer):
    text = nb.format_prompt("2 + 2?", tokenizer, use_chat_template=True)
    by_text = nb.create_rollout(model, tokenizer, text, FULL, seed=1)
    by_hook = nb.create_rollout(model, tokenizer, "2 + 2?", FULL, seed=1, use_chat_template=True)
    steps = [r.metadata["episode"].steps[0] for r in (by_text, by_hook)]
    assert (
        steps[0].prompt_ids
        == steps[1].prompt_ids
        == tuple(tokenizer(text, add_special_tokens=False).input_ids)
    )
    assert torch.equal(by_text.generation.token_ids, by_hook.generation.token_ids)
    torch.testing.assert_close(
        by_text.generation.logprobs.detach(), torch.tensor(steps[0].logprobs), rtol=0, atol=1e-3
    )


@pytest.mark.slow
def test_rewards_may_be_lists_vectors_batched_or_async(model, tokenizer):
    async def later(rollout):
        return 2.0

    @batched
    def together(rollouts):
        return [float(i) for i in range(len(rollouts))]

    def vector(rollout):
        return nb.compute_vector_reward(rollout, [lambda r: 1.0, lambda r: 3.0])

    def run(fn, **more):
        return nb.create_batch_rollouts(model, tokenizer, ["a", "b"], FULL, fn, **more)

    assert [r.reward for r in run(later)] == [2.0, 2.0]
    assert [r.reward for r in run(together)] == [0.0, 1.0]
    assert run(vector)[1].reward.tolist() == [1.0, 3.0]
    several = run([later, together], aggregator=nb.max_aggregator)[1]
    assert several.reward == 2.0 and several.metadata["rewards"] == {"later": 2.0, "together": 1.0}
    assert run(lambda r: None)[0].reward is None


def test_results_of_tools_are_text_as_they_print(model, tokenizer):
    said = iter(["call", "call", "end"])

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        ids = tokenizer(next(said) + "<|im_end|>", add_special_tokens=False).input_ids
        return nb.Generation("", torch.tensor(ids), None, torch.ones(len(ids)))

    seen = []
    found = nb.create_multiturn_rollout(
        model,
        tokenizer,
        "hi",
        FULL,
        lambda r: 1.0,
        generator=generator,
        tool_parser=lambda text: [{"name": "f", "arguments": {"x": 1}}] if text == "call" else [],
        tool_executor=lambda call: seen.append(call) or {"a": None},
        stop_condition=lambda conversation: len(conversation.messages) >= 5,
    )
    assert seen == [{"name": "f", "arguments": {"x": 1}}] * 2
    assert [m.content for m in found.conversation.messages] == [
        "hi",
        "call",
        "{'a': None}",
        "call",
        "{'a': None}",
    ]
    assert len(found.metadata["episode"].steps) == 2


def test_training_takes_the_configs_numbers_and_says_what_it_ignores(model, tokenizer):
    """Token limit and temperature reach training; a cut distribution and a KL without a reference
    are named."""
    lengths, logprobs = [], []

    def reward(rollout):
        lengths.append(len(rollout.generation.token_ids))
        logprobs.append(rollout.generation.logprobs.sum().item())
        return 1.0

    optimizer = torch.optim.AdamW(model.parameters())
    given = (
        model,
        tokenizer,
        ["a", "b"],
        nb.GenerationConfig(3, do_sample=False),
        nb.create_grpo_config(),
        reward,
        optimizer,
    )
    with pytest.warns(UserWarning, match=r"kl_coef=0\.1 has no effect"):
        first = nb.training_iteration(*given)
    assert max(lengths) <= 3 and len({*logprobs[:4]}) == 1 and first.total_tokens == sum(lengths)
    quiet = *given[:4], nb.create_grpo_config(kl_coef=0.0), *given[5:]
    with pytest.warns(UserWarning, match="taken as 1 and 0"):
        assert nb.training_iteration(*quiet[:3], nb.GenerationConfig(3), *quiet[4:]).step == 2
    with pytest.raises(ValueError, match="ref_update_fn is given, and no ref_model"):
        nb.training_iteration(*quiet, None, nb.create_ema_updater())
    with pytest.raises(ValueError, match="compares no pairs"):
        nb.training_iteration(*quiet, pair_selector=lambda rollouts: [])


def test_train_takes_the_rate_of_its_config_and_refuses_two_choices(model, tokenizer, tmp_path):
    rates = []

    def optimizer_fn(parameters, lr):
        rates.append(lr)
        return torch.optim.SGD(parameters, lr)

    config = nb.TrainingConfig(learning_rate=3e-5, kl_coef=0.0)
    given = (model, ["a"], lambda rollout: 1.0, 1, 1)
    own = {"gen_config": FULL, "train_config": config, "tokenizer": tokenizer}
    own |= {"output_dir": tmp_path, "optimizer_fn": optimizer_fn, "log_fn": lambda state: None}
    nb.train(*given, **own, save_every=0)
    assert rates == [3e-5] and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="switch_strategy chooses one for each"):
        nb.train(*given, **own, switch_strategy=lambda step: "dapo")


@pytest.mark.slow
def test_a_generator_samples_in_its_own_iteration_alone(model, tokenizer):
    calls = []

    def generator(model, tokenizer, prompt, config, compute_logprobs):
        calls.append(prompt)
        return nb.generate(model, tokenizer, prompt, config)

    config = nb.create_grpo_config(kl_coef=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = (model, tokenizer, ["a"], FULL, config, lambda rollout: 1.0, optimizer)
    nb.training_iteration(*given, generator=generator)
    assert len(calls) == config.group_size
    nb.training_iteration(*given)
    assert len(calls) == config.group_size


@pytest.mark.slow
def test_every_hook_of_an_iteration_is_called_and_trains(model, tokenizer):
    """The document's own loss as a loss_fn gives the step that the config alone gives: its
    log-probs carry the gradient."""
    weights, seen = [], []
    for hooks in (
        {},
        {"loss_fn": nb.compute_policy_gradient_loss, "advantage_fn": nb.compute_advantages},
    ):
        own = copy.deepcopy(model)
        optimizer, config = (
            torch.optim.SGD(own.parameters(), lr=1.0),
            nb.create_grpo_config()._replace(max_grad_norm=0.0),
        )
        ref = nb.create_reference_model(own)
        kl_fn = lambda policy, ref, mask: seen.append(mask) or (policy - ref).sum(1)  # noqa: E731
        reward = lambda r: float(r.generation.token_ids[0] % 7)  # noqa: E731
        nb.training_iteration(
            own,
            tokenizer,
            ["a", "b"],
            FULL,
            config,
            reward,
            optimizer,
            ref,
            seed=3,
            kl_fn=kl_fn,
            **hooks,
        )
        weights.append(
            torch.nn.utils.parameters_to_vector(own.parameters())
            - torch.nn.utils.parameters_to_vector(model.parameters())
        )
    assert len(seen) >= 2 and weights[0].abs().max() > 0
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("threshold, moved", [(1e9, False), (-1.0, True)])
def test_an_updater_is_given_the_kl_that_it_asks_for(threshold, moved, model):
    ref = nb.create_reference_model(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    nb.update_reference_model(
        ref, model, nb.create_kl_updater(threshold if threshold > 0 else 1e-9), kl=0.1
    )
    assert torch.equal(ref.lm_head.weight, model.lm_head.weight) is moved
