"""Explain one sampled token of a run: its distribution when it was sampled, its advantage, and how
its step changed its probability.

The policies are computed again from the nearest checkpoint and the recorded rollouts. Nothing is
sampled, and nothing is written.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.algorithm import Algorithm
from rlkit.episodes.record import load_rollouts
from rlkit.errors import ConfigError, show_controls
from rlkit.extras.why.evidence import Evidence
from rlkit.extras.why.settings import ALONE
from rlkit.functional import clipped, mix, token_ratio
from rlkit.system import rng
from rlkit.system.device import autocast
from rlkit.system.shards import index_steps
from rlkit.training.callbacks.checkpoints import list_checkpoints, parse_step, read_checkpoint
from rlkit.training.experiment import Experiment
from rlkit.training.groups import accept
from rlkit.training.learner import Learner
from rlkit.training.run import ready
from rlkit.types import Policy, Rollout, Splits, bound, plain

SHOWN = 5  # likeliest tokens
EXACT = 1e-4  # nats; a larger difference from the recorded log-prob is named


class Token(NamedTuple):
    """A sampled token of a recorded rollout."""

    step: int  # the RL step whose batch has the token
    rollout: int  # position in the step
    token: int  # position among the rollout's sampled tokens
    reply: int
    place: int  # position in the reply
    id: int
    context: tuple[int, ...]  # all token ids before it
    logprob: float  # log-prob by the sampler
    version: int  # number of RL steps behind the sampling weights


class TokenEffect(NamedTuple):
    """The role of a token in the update of its step."""

    advantage: float
    scale: float  # off-policy correction × token filter
    trained: bool
    group: dict[int, float]  # position in the step → reward as the advantage saw it


class Move(NamedTuple):
    """A token's probability before and after the update of its step."""

    before: float
    after: float


def read_step(folder: Path, step: int) -> list[Rollout]:
    """Read all rollouts of a step. Raises: ConfigError if they are not recorded."""
    parts = index_steps(folder / "rollouts")
    if step not in parts:
        known = f"steps {min(parts)} to {max(parts)}" if parts else "no step"
        raise ConfigError(
            f"step {step}: its rollouts are not in {folder}/rollouts ({known});"
            " callbacks.rollouts.every=1 keeps all"
        )
    return load_rollouts(parts[step])


def find_token(played: Sequence[Rollout], step: int, rollout: int, token: int) -> Token:
    """Find a token of a step by its numbers, counted from 0. Raises: ConfigError if it does not
    exist."""
    if rollout >= len(played):
        raise ConfigError(f"rollout={rollout}: step {step} has {len(played)}, counted from 0")
    own = played[rollout]
    places = [(reply, i) for reply, said in enumerate(own.steps) for i in said.sampled]
    if token >= len(places):
        raise ConfigError(
            f"token={token}: rollout {rollout} of step {step} has {len(places)} sampled tokens,"
            " counted from 0"
        )
    reply, place = places[token]
    said = own.steps[reply]
    [*_, version] = [version for first, version in said.versions if first <= place]
    return Token(
        step=step,
        rollout=rollout,
        token=token,
        reply=reply,
        place=place,
        id=said.response_ids[place],
        context=(*own.context(reply), *said.response_ids[:place]),
        logprob=said.logprobs[place],
        version=version,
    )


# ------------------------------------------------------------------------------------------- replay


def find_nearest_checkpoint(folder: Path, version: int) -> tuple[int, Path | None]:
    """Find the newest checkpoint up to a version: its RL step and its file. 0 and None mean the
    start of the run."""
    known = {parse_step(path): path for path in list_checkpoints(folder / "checkpoints")}
    start = max((step for step in known if step <= version), default=0)
    return start, known.get(start)


def repeat_steps(
    x: Experiment, tasks: Splits, e: Evidence, version: int, last: int
) -> Iterator[Learner]:
    """Train again on the recorded rollouts, from the nearest checkpoint.

    Yields: the learner with the weights of the checkpoint, at most `version`, and after each
      further step up to `last`.
    Raises: ConfigError if a step is not recorded or learned from kept groups too.
    """
    if x.reuse.active:
        raise ConfigError("task.reuse is on: the groups learned from again are not recorded")
    folder = e.run.folder
    _, path = find_nearest_checkpoint(folder, version)
    with redirect_stdout(io.StringIO()):
        policy, device, exact = ready(x, tasks)
        learner = Learner(x, policy, exact=exact)
    if path is not None:
        learner.load_state_dict(read_checkpoint(path))
    rows = {row["step"]: row for row in e.run.rows}
    yield learner
    while learner.rl_step < last:
        played = read_step(folder, learner.rl_step + 1)
        with autocast(x, device, updates=True):
            now = learner.begin()
            learner.step(played, choose_trained(now, policy, played, step=learner.rl_step))
        row = rows.get(learner.rl_step, {})
        # schedules may follow evaluations
        learner.metrics |= {name: row[name] for name in row if name.startswith("eval/")}
        yield learner


def choose_trained(
    x: Experiment, policy: Policy, played: Sequence[Rollout], *, step: int
) -> list[Rollout]:
    """Return the trained rollouts of a step. These are all rollouts, or with refills the accepted
    groups, chosen in rounds as in `rlkit.training.groups.experience`."""
    if not x.algorithm.max_refills:
        return list(played)
    accepted: list[Rollout] = []
    seen = 0
    while seen < len(played):
        missing = max(1, x.batch.prompts - len(accepted) // x.batch.group_size)
        end = min(len(played), seen + missing * x.batch.group_size)
        with rng.seed_block(mix(x.seed, step, end)):
            accepted += accept(x, policy, list(played[seen:end]))
        seen = end
    return accepted or list(played)


@torch.no_grad()
def predict(learner: Learner, token: Token) -> Tensor:
    """Compute the log-probs [V] of all tokens at this place, by the learner's current policy at
    temperature 1."""
    model = learner.model
    device = next(model.parameters()).device
    with autocast(learner.x, device):
        logits = model(input_ids=torch.tensor([token.context], device=device)).logits
    return logits[0, -1].float().log_softmax(-1)


def apply_temperature(logprobs: Tensor, temperature: float) -> Tensor:
    """Convert log-probs to those of sampling at another temperature."""
    return (logprobs / temperature).log_softmax(-1)


def measure_gaps(x: Experiment, tasks: Splits, e: Evidence, tokens: Sequence[Token]) -> list[float]:
    """Compute |log-prob computed again - recorded log-prob| of each token, in nats, version by
    version."""
    versions = [token.version for token in tokens]
    gaps = []
    for learner in repeat_steps(x, tasks, e, min(versions), max(versions)):
        temperature = learner.begin().generation.temperature
        for token in tokens:
            if token.version == learner.rl_step:
                found = apply_temperature(predict(learner, token), temperature)
                gaps.append(abs(float(found[token.id]) - token.logprob))
    return gaps


def read_effect(learner: Learner, token: Token) -> TokenEffect:
    """Read a token's advantage from the batch of the learner's newest step.

    Raises: ConfigError if the batch has another token at this place, because the config has changed
      since the run.
    """
    batch = learner.batch
    assert batch is not None
    places = {name_sample(own): i for i, own in enumerate(learner.rollouts)}
    numbers = [places[name_sample(own)] for own in learner.trained]
    if token.rollout not in numbers:
        return TokenEffect(0.0, 0.0, trained=False, group={})
    own = numbers.index(token.rollout)
    rows = (batch.rollout_ids == own).nonzero()[:, 0]
    row, column = batch.sampled_mask[rows].nonzero()[token.token].tolist()
    row = int(rows[row])
    if int(batch.ids[row, column]) != token.id:
        raise ConfigError(f"step {token.step} of this run was not made of its recorded rollouts")
    mates = (batch.group_ids == batch.group_ids[own]).nonzero()[:, 0].tolist()
    return TokenEffect(
        advantage=float(batch.advantages[row, column]),
        scale=float(batch.scale[row, column]),
        trained=bool(batch.response_mask[row, column]),
        group={numbers[i]: float(batch.rewards[i]) for i in mates},
    )


def name_sample(rollout: Rollout) -> tuple[int, int, int | None]:
    """Return a key for a rollout's place in its step; it is the same for the rollout's normalised
    copy."""
    return rollout.group, rollout.sample, rollout.player


# ---------------------------------------------------------------------------------------- sentences


def explain_token(x: Experiment, tasks: Splits, e: Evidence, token: Token) -> Iterator[str]:
    """Describe the origin of a token, the parts of its advantage, and how its step changed its
    probability."""
    start, _ = find_nearest_checkpoint(e.run.folder, token.version)
    again = f"{token.step - start} RL step{'s' if token.step - start > 1 else ''}"
    yield f"(computed again from step {start}, by {again} on the recorded rollouts)"
    learner = None
    found: dict[int, Tensor] = {}
    for learner in repeat_steps(x, tasks, e, token.version, token.step):
        version = learner.rl_step
        if version == token.step - 1:
            now = learner.begin()
        if version in (token.version, token.step - 1, token.step):
            found[version] = predict(learner, token)
    assert learner is not None
    decode = learner.policy.renderer.tokenizer.decode
    then, before, after = (
        apply_temperature(found[version], now.generation.temperature)
        for version in (token.version, token.step - 1, token.step)
    )
    yield (
        f"step {token.step}, rollout {token.rollout}, token {token.token}, in reply"
        f" {token.reply} (all counted from 0 but the step): {quote_token(decode([token.id]))}"
    )
    gap = float(then[token.id]) - token.logprob
    said = "as recorded" if abs(gap) <= EXACT else f"recorded: {token.logprob:.5f}"
    yield (
        f"Step {token.step} sampled it with the weights after step {token.version}, with log-prob"
        f" {float(then[token.id]):.5f} ({said}). Their distribution:"
    )
    for i in dict.fromkeys([*then.topk(SHOWN).indices.tolist(), token.id]):
        mark = "  <- sampled" if i == token.id else ""
        yield f"  {math.exp(then[i]):.4f}  {quote_token(decode([i]))}{mark}"
    made = read_effect(learner, token)
    yield from say_effect_of_step(
        made, token, grouped=plain(now.algorithm.advantage).__name__ not in ALONE
    )
    ratio = math.exp(float(before[token.id]) - token.logprob)
    moved = Move(math.exp(before[token.id]), math.exp(after[token.id]))
    yield (
        f"Before the update its ratio (probability by the trainer / by the sampler) was"
        f" {ratio:.4f}. The update moved its probability from {moved.before:.4f} to"
        f" {moved.after:.4f}."
    )
    fresh = token.version == token.step - 1
    yield judge_move(made, moved, say_clip(now.algorithm, made.advantage, moved) if fresh else "")


def judge_move(made: TokenEffect, moved: Move, clip: str) -> str:
    """Say in a sentence whether the update did what the advantage asked for."""
    if not made.trained or made.advantage * made.scale == 0:
        return "Verdict: nothing was asked of this token, and it moved with the others of its step."
    up = made.advantage > 0
    sign = "positive" if up else "negative"
    asked = "raise" if up else "lower"
    if (moved.after > moved.before) == up and moved.after != moved.before:
        did = "raised" if up else "lowered"
        done = f"the update {did} its probability, as its {sign} advantage asked"
    else:
        done = (
            f"the update did not {asked} its probability, as its {sign} advantage asked: the other"
            " tokens of the step moved it further"
        )
    return f"Verdict: {done}{clip}."


def say_clip(algorithm: Algorithm, advantage: float, moved: Move) -> str:
    """Say whether PPO's clip stopped the update on a token; "" for any other loss or ratio.

    The first update of a step has ratio 1, so it is never clipped.
    """
    loss = algorithm.policy_loss
    if plain(loss) is not clipped or plain(algorithm.ratio) is not token_ratio:
        return ""
    if algorithm.epochs * algorithm.minibatches == 1:
        return "; not clipped, because the step has one update"
    ratio = moved.after / moved.before
    limit = 1 + bound(loss).get("clip_high", math.nan)
    beyond = ratio > limit
    if advantage < 0:
        limit = 1 - bound(loss).get("clip_low", math.nan)
        beyond = ratio < limit
    if beyond:
        return f"; clipped, because its ratio went to {ratio:.3g}, beyond {limit:g}"
    return f"; not clipped, because its ratio went to {ratio:.3g}, within {limit:g}"


def say_effect_of_step(made: TokenEffect, token: Token, *, grouped: bool) -> Iterator[str]:
    """Name the advantage, and the other rollouts of the group."""
    if not made.trained:
        yield "The step did not train on it: its rollout or its group was left out."
        return
    rewards = dict(made.group)
    own = rewards.pop(token.rollout)
    scaled = f", times {made.scale:.3g} by correction and filter" if made.scale != 1 else ""
    yield f"Its advantage was {made.advantage:+.3f}{scaled}. Its rollout earned {own:.3g}."
    if grouped and rewards:
        others = ", ".join(f"{i}: {reward:.3g}" for i, reward in rewards.items())
        yield f"It was compared with these rollouts of its group: {others}."


def quote_token(text: str) -> str:
    """Write a token in quotation marks, with control characters escaped."""
    return f"'{show_controls(text)}'"
