"""Every call that the notebook of primitives makes on its own functions, made as it makes it, with
the embedded model."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import rlkit.notebook as nb
from parametrise import cases
from rlkit.rewards import batched

PROMPTS = ["What is 2 + 3?", "Name a colour.", "What is 2 + 3?", "Say DONE."]
SHORT = nb.GenerationConfig(max_new_tokens=8, temperature=0.7)


def length(rollout):
    return float(len(rollout.generation.token_ids) % 5)


def text_length(rollout):
    return float(len(rollout.generation.text))


@batched
def by_place(rollouts):
    return [float(i) for i in range(len(rollouts))]


class Notebook:
    """What the calls share: the variables of the notebook's cells."""

    def __init__(self, model, tokenizer, folder):
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.generation = nb.generate(model, tokenizer, PROMPTS[0], SHORT, compute_logprobs=True)
        self.messages = [nb.Message(role="user", content="hello")]
        self.rollout = nb.Rollout(prompt="p", generation=self.generation, reward=1.0)
        self.rollouts = nb.create_batch_rollouts(
            model, tokenizer, PROMPTS[:1] * 4, SHORT, by_place, None, 0.1
        )
        self.advantages = nb.compute_advantages(self.rollouts)
        self.logprobs = torch.nn.utils.rnn.pad_sequence(
            [r.generation.logprobs.detach() for r in self.rollouts], batch_first=True
        )
        self.mask = torch.nn.utils.rnn.pad_sequence(
            [r.generation.valid_mask for r in self.rollouts], batch_first=True
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def cell(tiny, tmp_path_factory):
    torch.manual_seed(0)
    return Notebook(
        copy.deepcopy(tiny.model).eval(),
        nb.load_tokenizer("tiny"),
        tmp_path_factory.mktemp("notebook"),
    )


def scored(c):
    ids = c.tokenizer([PROMPTS[0]], return_tensors="pt")
    generated = c.generation.token_ids
    return nb.compute_logprobs_for_tokens(
        c.model, ids.input_ids, ids.attention_mask, generated.unsqueeze(0), c.tokenizer.pad_token_id
    )


def stepped(c, config, reference=False):
    model = copy.deepcopy(c.model)
    more = (nb.create_reference_model(model),) if reference else ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return nb.training_iteration(
        model, c.tokenizer, PROMPTS[:2], SHORT, config, length, optimizer, *more
    )


def trained(c, **more):
    return nb.train(
        "tiny", PROMPTS, length, num_steps=1, batch_size=2, output_dir=str(c.folder / "out"), **more
    )


def multiturn(c):
    return nb.create_multiturn_rollout(
        c.model,
        c.tokenizer,
        "Solve: 15 * 23 + 17",
        SHORT,
        text_length,
        tool_parser=lambda text: [],
        tool_executor=lambda call: "never",
        stop_condition=lambda conversation: len(conversation.messages) >= 10,
    )


def whole(value):
    return math.isfinite(value.item())


CALLS = {
    # name: (the call, what holds of its outcome)
    "Generation": (
        lambda c: nb.Generation(
            text="a", token_ids=torch.ones(1), logprobs=None, valid_mask=torch.ones(1), metadata={}
        ),
        lambda g, c: g.text == "a",
    ),
    "parse_thinking": (
        lambda c: nb.parse_thinking(
            c.tokenizer("<think>2 + 2</think>4<|im_end|>", add_special_tokens=False).input_ids,
            c.tokenizer,
        ),
        lambda said, c: said == ("2 + 2", "4"),
    ),
    "compute_logprobs_for_tokens": (
        scored,
        lambda x, c: x.shape == (1, len(c.generation.token_ids)) and x.requires_grad,
    ),
    "generate": (
        lambda c: nb.generate(c.model, c.tokenizer, PROMPTS[0], SHORT, compute_logprobs=True),
        lambda g, c: (
            g.token_ids.shape == g.logprobs.shape == g.valid_mask.shape and g.logprobs.requires_grad
        ),
    ),
    "generate without log-probs": (
        lambda c: nb.generate(c.model, c.tokenizer, "a", SHORT),
        lambda g, c: g.logprobs is None,
    ),
    "generate by a generator": (
        lambda c: nb.generate(
            c.model, c.tokenizer, "a", SHORT, True, lambda *given: (given[2], given[4])
        ),
        lambda g, c: g == ("a", True),
    ),
    "Rollout before its reward": (
        lambda c: nb.Rollout(prompt="p", generation=c.generation, reward=0.0, kl_penalty=0.1),
        lambda r, c: r.conversation is None and r.metadata == {},
    ),
    "Rollout": (
        lambda c: nb.Rollout(prompt="p", generation=c.generation, reward=1.0 - 0.1, kl_penalty=0.1),
        lambda r, c: r.reward == 0.9 and r.kl_penalty == 0.1,
    ),
    "Rollout of a conversation": (
        lambda c: nb.Rollout(
            prompt="p",
            generation=c.generation,
            reward=0.0,
            conversation=nb.Conversation(messages=c.messages),
        ),
        lambda r, c: r.conversation.messages[-1].role == "user",
    ),
    "Conversation": (
        lambda c: nb.Conversation(messages=c.messages),
        lambda x, c: x.messages is c.messages,
    ),
    "Message of a user": (
        lambda c: nb.Message(role="user", content="Tool result: 4"),
        lambda m, c: len(m.tool_calls) == 0,
    ),
    "Message of the policy": (
        lambda c: nb.Message(role="assistant", content="x", tool_calls=[{"name": "f", "args": ""}]),
        lambda m, c: m.tool_calls[0]["name"] == "f",
    ),
    "create_rollout": (
        lambda c: nb.create_rollout(c.model, c.tokenizer, PROMPTS[0], SHORT, length, None, 0.1),
        lambda r, c: r.prompt == PROMPTS[0] and r.reward == length(r) and r.kl_penalty == 0.0,
    ),
    "create_rollout by its name": (
        lambda c: nb.create_rollout(
            c.model, c.tokenizer, PROMPTS[0], reward_fn=text_length, seed=1
        ),
        lambda r, c: r.reward == text_length(r),
    ),
    "create_rollout with a reference": (
        lambda c: nb.create_rollout(
            c.model, c.tokenizer, PROMPTS[0], SHORT, length, nb.create_reference_model(c.model), 0.1
        ),
        lambda r, c: r.reward == length(r) and r.kl_penalty == 0.0,
    ),
    "create_multiturn_rollout": (
        multiturn,
        lambda r, c: (
            [m.role for m in r.conversation.messages] == ["user", "assistant"]
            and r.reward == text_length(r)
        ),
    ),
    "create_batch_rollouts": (
        lambda c: nb.create_batch_rollouts(
            c.model, c.tokenizer, PROMPTS, SHORT, length, None, nb.TrainingConfig().kl_coef
        ),
        lambda rollouts, c: [r.prompt for r in rollouts] == PROMPTS,
    ),
    "compute_forward_kl": (
        lambda c: nb.compute_forward_kl(c.logprobs, c.logprobs - 0.5, c.mask),
        lambda kl, c: torch.allclose(kl, torch.full((4,), 0.5)),
    ),
    "compute_forward_kl by a kl_fn": (
        lambda c: nb.compute_forward_kl(
            c.logprobs, c.logprobs - 9, c.mask, kl_fn=nb.create_truncated_kl(threshold=1.0)
        ),
        lambda kl, c: kl.shape == (4,) and bool((kl < 1).all()),
    ),
    "compute_reverse_kl": (
        lambda c: nb.compute_reverse_kl(c.logprobs, c.logprobs - 0.5, c.mask),
        lambda kl, c: kl.shape == (4,) and bool((kl > -0.5).all()),
    ),
    "compute_kl": (
        lambda c: nb.compute_kl(c.logprobs, c.logprobs - 9, kl_fn=nb.truncated_kl),
        lambda kl, c: kl.shape == (4,),
    ),
    "create_adaptive_kl": (
        lambda c: nb.create_adaptive_kl(confidence_threshold=0.1)(
            c.logprobs, c.logprobs - 1, c.mask
        ),
        lambda kl, c: kl.shape == (4,),
    ),
    "TrainingConfig of GRPO": (
        lambda c: nb.TrainingConfig(algorithm="grpo", kl_coef=0.2, normalize_advantages=False),
        lambda x, c: (
            (x.kl_coef, x.learning_rate, x.clip_range, x.max_grad_norm) == (0.2, 1e-4, 0.2, 1.0)
        ),
    ),
    "TrainingConfig of PPO": (
        lambda c: nb.TrainingConfig(
            algorithm="ppo", clip_range=0.3, kl_coef=0.0, normalize_advantages=True
        ),
        lambda x, c: (x.algorithm, x.clip_range) == ("ppo", 0.3),
    ),
    "create_grpo_config": (
        lambda c: nb.create_grpo_config(),
        lambda x, c: (x.algorithm, x.kl_coef) == ("grpo", 0.1),
    ),
    "create_grpo_config with a KL": (
        lambda c: nb.create_grpo_config(kl_coef=0.3),
        lambda x, c: x.kl_coef == 0.3,
    ),
    "create_dapo_config": (
        lambda c: nb.create_dapo_config(),
        lambda x, c: (x.algorithm, x.beta) == ("dapo", 0.1),
    ),
    "create_dapo_config with beta": (
        lambda c: nb.create_dapo_config(beta=0.3),
        lambda x, c: x.beta == 0.3,
    ),
    "create_ppo_config": (
        lambda c: nb.create_ppo_config(0.1, 0.6, 0.2),
        lambda x, c: (
            (x.algorithm, x.clip_range, x.value_loss_coef, x.kl_coef) == ("ppo", 0.1, 0.6, 0.2)
        ),
    ),
    "get_algorithm_config": (
        lambda c: nb.get_algorithm_config(
            60, lambda iteration: "grpo" if iteration < 50 else "dapo"
        ),
        lambda x, c: x.algorithm == "dapo",
    ),
    "get_algorithm_config by default": (
        lambda c: nb.get_algorithm_config(0),
        lambda x, c: x.algorithm == "grpo",
    ),
    "compute_advantages": (
        lambda c: nb.compute_advantages(c.rollouts, normalize=True),
        lambda x, c: x.shape == c.mask.shape and x.any() and abs(x[:, 0].sum().item()) < 1e-4,
    ),
    "compute_advantages by a function": (
        lambda c: nb.compute_advantages(
            c.rollouts, False, lambda rollouts, normalize: (len(rollouts), normalize)
        ),
        lambda x, c: x == (4, False),
    ),
    "compute_policy_gradient_loss": (
        lambda c: nb.compute_policy_gradient_loss(c.rollouts, c.advantages),
        lambda loss, c: loss.requires_grad and whole(loss),
    ),
    "compute_policy_gradient_loss by a function": (
        lambda c: nb.compute_policy_gradient_loss(
            c.rollouts, c.advantages, lambda rollouts, advantages: advantages
        ),
        lambda x, c: x is c.advantages,
    ),
    "compute_dapo_loss": (
        lambda c: nb.compute_dapo_loss(c.rollouts, beta=0.1),
        lambda loss, c: loss.requires_grad and whole(loss),
    ),
    "compute_dapo_loss by a selector": (
        lambda c: nb.compute_dapo_loss(c.rollouts, 0.1, lambda rollouts: []),
        lambda loss, c: loss.item() == 0 and loss.requires_grad,
    ),
    "compute_ppo_loss": (
        lambda c: nb.compute_ppo_loss(c.rollouts, c.logprobs, c.advantages, 0.2),
        lambda loss, c: loss.shape == () and loss.requires_grad,
    ),
    "TrainingState": (
        lambda c: nb.TrainingState(step=0, total_tokens=3, metrics={"loss": 1.0}),
        lambda x, c: x.ema_metrics == {} and x.total_tokens == 3,
    ),
    "load_model": (
        lambda c: nb.load_model("tiny", use_lora=True),
        lambda m, c: any(p.requires_grad for p in m.parameters()) and not m.training,
    ),
    "load_model by a loader": (
        lambda c: nb.load_model("any", model_loader=lambda *given: given),
        lambda given, c: given == ("any", "bfloat16", "auto", False, 16, 32),
    ),
    "load_tokenizer": (
        lambda c: nb.load_tokenizer("tiny"),
        lambda t, c: t.padding_side == "left" and t.pad_token is not None,
    ),
    "format_prompt": (
        lambda c: nb.format_prompt(
            "2 + 2?", c.tokenizer, use_chat_template=True, system_prompt="Be brief."
        ),
        lambda text, c: "2 + 2?" in text and "Be brief." in text,
    ),
    "format_prompt by a function": (
        lambda c: nb.format_prompt(
            "a", c.tokenizer, True, "s", True, lambda *given: given[0] + given[3]
        ),
        lambda text, c: text == "as",
    ),
    "GenerationConfig": (
        lambda c: nb.GenerationConfig(max_new_tokens=256, temperature=0.7),
        lambda x, c: (x.top_p, x.top_k, x.do_sample) == (0.9, 50, True),
    ),
    "create_reference_model": (
        lambda c: nb.create_reference_model(c.model),
        lambda m, c: m is not c.model and not any(p.requires_grad for p in m.parameters()),
    ),
    "create_reference_model by a function": (
        lambda c: nb.create_reference_model(c.model, ref_model_fn=lambda policy: (policy,)),
        lambda m, c: m == (c.model,),
    ),
    "training_iteration of GRPO": (
        lambda c: stepped(c, nb.create_grpo_config(), True),
        lambda s, c: s.step == 1 and {"loss", "reward", "kl"} <= s.metrics.keys(),
    ),
    "training_iteration of DAPO": (
        lambda c: stepped(c, nb.create_dapo_config()),
        lambda s, c: s.total_tokens > 0,
    ),
    "training_iteration of PPO": (
        lambda c: stepped(c, nb.create_ppo_config()),
        lambda s, c: s.metrics["value_loss"] > 0,
    ),
    "update_ema_metrics": (
        lambda c: nb.update_ema_metrics({"loss": 0.0, "new": 2.0}, {"loss": 1.0}),
        lambda ema, c: ema == {"loss": 0.9, "new": 2.0},
    ),
    "save_checkpoint": (
        lambda c: nb.save_checkpoint(c.model, c.tokenizer, 49, str(c.folder)),
        lambda none, c: none is None and nb.load_checkpoint(c.folder).step == 49,
    ),
    "save_checkpoint by a function": (
        lambda c: nb.save_checkpoint(
            c.model, c.tokenizer, 1, "out", lambda *given: c.messages.append(given[2:])
        ),
        lambda none, c: c.messages.pop() == (1, "out"),
    ),
    "train": (
        lambda c: trained(c),
        lambda both, c: len(both) == 2 and both[1].pad_token is not None,
    ),
    "train with a reference": (
        lambda c: trained(c, algorithm="dapo", use_ref_model=True, kl_coef=0.2, gen_config=SHORT),
        lambda both, c: len(both) == 2,
    ),
    "compute_scalar_reward": (
        lambda c: nb.compute_scalar_reward(c.rollout, lambda r: 0.5),
        lambda x, c: x == 0.5,
    ),
    "compute_vector_reward": (
        lambda c: nb.compute_vector_reward(
            c.rollout, [lambda r: 1.0, lambda r: 0.0, lambda r: 0.5]
        ),
        lambda v, c: isinstance(v, np.ndarray) and v.tolist() == [1.0, 0.0, 0.5],
    ),
    "aggregate_vector_rewards": (
        lambda c: nb.aggregate_vector_rewards(
            np.array([1.0, 0.0, 0.5]), nb.weighted_sum_aggregator([0.5, 0.3, 0.2])
        ),
        lambda x, c: x == pytest.approx(0.6),
    ),
    "aggregators": (
        lambda c: [
            fn(np.array([1.0, 3.0]))
            for fn in (nb.min_aggregator, nb.max_aggregator, nb.mean_aggregator)
        ],
        lambda x, c: x == [1.0, 3.0, 2.0],
    ),
    "rewards": (
        lambda c: [
            fn(c.rollout._replace(generation=c.generation._replace(text="the answer is 4")))
            for fn in (
                nb.length_penalty_reward(50, 500),
                nb.format_reward(r"answer is \d"),
                nb.exact_match_reward(
                    lambda prompt: "4" if prompt == "p" else "", lambda text: text[-1]
                ),
                nb.tool_usage_reward(min_tools=1),
            )
        ],
        lambda x, c: x == [-0.5, 1.0, 1.0, 0.0],
    ),
    "create_ema_updater": (
        lambda c: nb.update_reference_model(
            nb.create_reference_model(c.model), c.model, nb.create_ema_updater(decay=0.999)
        ),
        lambda none, c: none is None,
    ),
    "create_periodic_updater": (
        lambda c: nb.create_periodic_updater(update_every=20)(
            nb.create_reference_model(c.model), c.model
        ),
        lambda none, c: none is None,
    ),
}


@pytest.mark.parametrize("name", cases(CALLS, 4))
@pytest.mark.filterwarnings("ignore:training samples", "ignore:kl_coef")
def test_a_call_of_the_notebook_runs_as_written(name, cell):
    call, holds = CALLS[name]
    assert holds(call(cell), cell)
