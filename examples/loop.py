"""The default run of `rlkit train` as a loop on one page: GRPO on word problems with a calculator.

    python examples/loop.py

It runs offline on two cores of a CPU. Test accuracy rises from 0.48 to above 0.95 in half a minute.

Every stage is a plain function. Change one, and you have an algorithm of your own.
"""

import copy
import os

import torch

import rlkit
from rlkit import functional as F
from rlkit.models import forward_logprobs, pack
from rlkit.training.update.split import select
from rlkit.types import Weighted

STEPS, PROMPTS, SAMPLES, MINIBATCHES = int(os.environ.get("EXAMPLE_STEPS", "20")), 16, 8, 2
RATE, CLIP, KL = 3e-4, 0.2, 0.05

# The policy, its problems, the environment with its tools, and the reward of a right answer.
policy = rlkit.load_policy(path="tiny")
problems = rlkit.tasks.arithmetic(split="train", max_samples=4096)
environment = rlkit.environments.tool_use(
    tools={"calculator": rlkit.environments.calculator},
    parse_calls=rlkit.environments.hermes,
    max_turns=4,
)
reward = rlkit.Reward("numeric", {"numeric": rlkit.Term(1.0, rlkit.rewards.numeric)})
engine = rlkit.engines.Cached()
optimizer = torch.optim.AdamW(
    policy.model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0
)
reference = copy.deepcopy(policy.model)


def logprobs_of(model, batch):
    """Return the log-probs [B, T] of the sampled tokens, in nats."""
    return forward_logprobs(model, pack(batch.ids, batch.response_mask)).logprobs


def prepared(rollouts):
    """Return scored rollouts as tensors, with everything that stays fixed during the updates.

    These are the advantages, and the log-probs of the old policy and the reference.
    """
    batch = rlkit.assemble(rollouts, pad_token_id=policy.pad_token_id)
    advantages = F.group_mean(
        batch.rewards, batch.group_ids
    )  # [N], reward minus the mean of the prompt's samples
    advantages = advantages[batch.rollout_ids][:, None].expand(
        batch.ids.shape
    )  # [B, T], the same for every token of a rollout
    advantages = F.normalize_group(advantages, batch.rewards, batch.group_ids, batch.rollout_ids)
    with torch.no_grad():
        old, ref = logprobs_of(policy.model, batch), logprobs_of(reference, batch)
    return Weighted(
        **vars(batch),
        logprobs_old=old,
        logprobs_ref=ref,
        advantages=advantages,
        scale=torch.ones_like(old),
    )


def loss_of(batch):
    """Return the clipped surrogate plus the KL to the reference.

    Token weights make every rollout count alike.
    """
    logprobs = logprobs_of(policy.model, batch)
    ratio = F.token_ratio(logprobs, batch.logprobs_old, batch.response_mask)
    per_token = F.clipped(ratio, batch.advantages, clip_low=CLIP, clip_high=CLIP) + KL * F.k3(
        logprobs, batch.logprobs_ref
    )
    return (F.sequence_mean(batch.response_mask, batch.rollout_ids) * per_token).sum()


def update(batch, rate):
    """Make one optimizer step on each random half of the rollouts."""
    optimizer.param_groups[0]["lr"] = rate
    for chosen in torch.randperm(len(batch.rewards)).chunk(MINIBATCHES):
        rows = torch.isin(batch.rollout_ids, chosen).nonzero()[:, 0]
        optimizer.zero_grad()
        loss_of(select(batch, rows)).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()


def accuracy():
    """Return the share of 256 test problems solved by greedy decoding."""
    test = rlkit.tasks.arithmetic(split="test")[:256]
    return rlkit.greedy_accuracy(
        policy, test, environment, reward=reward, engine=engine, max_new_tokens=64
    )[0]["accuracy"]


torch.manual_seed(0)
before = accuracy()
for step in range(STEPS):
    drawn = problems[step * PROMPTS : (step + 1) * PROMPTS]
    rollouts = rlkit.collect(
        policy,
        drawn,
        environment,
        engine=engine,
        group_size=SAMPLES,
        step=step,
        version=step,
        max_new_tokens=64,
    )
    rollouts = rlkit.score(rollouts, reward)
    update(prepared(rollouts), rate=rlkit.schedules.decay(step, RATE, to=0.1, steps=STEPS))
    print(f"step {step + 1}: reward {sum(r.reward for r in rollouts) / len(rollouts):.2f}")
after = accuracy()
print(rollouts[0])
print(f"test accuracy {before:.3f} → {after:.3f}")
