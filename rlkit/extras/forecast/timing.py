"""Time passes of a run's own parts, so that `rlkit check` can forecast the run's cost on this
machine.

After one small step, a learner times sampling, updates and an evaluation. Each has the run's size
if this is cheap, and otherwise a part of it. Seconds are processor time or, on a GPU, wall-clock
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from rlkit.distributed import ranks
from rlkit.engines import Cached
from rlkit.engines.cached.cache import count_token_bytes
from rlkit.episodes.evaluation import greedy_accuracy
from rlkit.episodes.stream import StreamState
from rlkit.extras.forecast.costs import (
    SHARE,
    Costs,
    Counts,
    Passes,
    Room,
    Timed,
    count,
    count_evaluations,
    expect_drawn,
    forecast_peak,
    scale_passes,
    size_room,
)
from rlkit.models.critic import SeparateCritic
from rlkit.models.head import split_model
from rlkit.models.log_probs import choose_chunk_logits
from rlkit.rewards import Reward, Term
from rlkit.system.adapters import base_model
from rlkit.training.activations import LOGITS, fit_activations
from rlkit.training.experiment import BatchSize, Experiment, Sampling
from rlkit.training.groups import experience
from rlkit.training.learner import Learner
from rlkit.training.metrics import peak_memory
from rlkit.types import Rollout, Splits

T = TypeVar("T")

BUDGET = 4.0  # approximately the most seconds of a timed pass of sampling
UPDATE_BUDGET = 8.0  # the same for an update
# A pass of fewer seconds is run once untimed before it is timed, as a warm-up. Longer passes are
# warmed up by the smaller passes before them.
CHEAP = 1.0
LEAST = 4  # in the longer pass of sampling: the fewest tokens after the first of a reply
# Bytes on a CPU of the modules imported by a run but not by a check, mostly Lightning. Measured.
IMPORTS = 70 << 20
# Resident bytes on a CPU for each byte kept by autograd. torch requests aligned blocks, and glibc
# does not reuse a freed block of the same size for such a request. Measured with glibc 2.36: 1.6
# to 1.7.
RESIDENT = 1.7
# a reward for timed passes with short replies: it gives 0, and calls no verifier
UNSCORED = Reward("none", {"none": Term(1.0, lambda own: [0.0] * len(own), batched=True)})


class Given(NamedTuple):
    """Lengths set by the user as check.NAME. None leaves a length to the check."""

    prompt_tokens: float | None = None
    reply_share: float | None = None


class RunCost(NamedTuple):
    """The forecast cost of a run."""

    costs: Costs
    step: Counts
    source: str  # the source of the lengths, in words
    on: str  # the processor, in words
    peak: float = 0.0  # bytes of memory at the peak of the run
    activations: float = 0.0  # bytes of this peak for one micro-batch with its logits
    cache: float = 0.0  # bytes of this peak for keys and values


class Reads:
    """Run the forward passes of a learner (`Host.forward`), and add up the seconds of the passes
    without gradient."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, model: Any, function: Callable[..., T], *given: Any, **settings: Any) -> T:
        if torch.is_grad_enabled():
            return ranks.run_in_forward(model, function, *given, **settings)
        begun = read_clock(model)
        done = ranks.run_in_forward(model, function, *given, **settings)
        self.seconds += read_clock(model) - begun
        return done


def read_clock(model: nn.Module) -> float:
    """Return the seconds that this process has worked on a model so far."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Trial(NamedTuple):
    """A learner after its small step, and the run it belongs to."""

    learner: Learner  # its host uses `reads` for forward passes
    x: Experiment  # the run at its first step
    tasks: Splits
    reads: Reads
    small: Counts  # sizes of the small step
    update_s: float  # seconds of the small step's update, per token
    prompt_s: float = 0.0  # seconds of one prompt's samples, with one token per reply
    token_s: float = 0.0  # seconds per decoded token if one group decodes


def forecast_run(
    learner: Learner, x: Experiment, tasks: Splits, reads: Reads, given: Given
) -> RunCost:
    """Time the passes and scale them to the run. The learner's weights change.

    The caller sets any precision other than the precision of the weights, as in `Learner`.

    Args:
      learner: a learner after one small step.
      x: the run at its first step.
      tasks: the problems of the run.
      reads: the forward passes of the learner's host.
      given: the lengths set by the user.
    """
    small = count(learner.rollouts)
    spent = learner.metrics["perf/update_processor_s"]  # it is nan on a GPU
    seconds = spent if spent == spent else learner.metrics["perf/update_s"]
    t = Trial(learner, x, tasks, reads, small, seconds / small.packed)
    critic = x.algorithm.critic._replace(warmup=0)
    whole = x.algorithm._replace(max_refills=0, target_kl=None, critic=critic)
    cut = learner.configured._replace(batch=x.batch, algorithm=whole)
    learner.settle(cut, exact=learner.exact)
    first = learner.rollouts
    one, few = (sample(t, 1, tokens, UNSCORED)[0] for tokens in (1, 1 + LEAST))
    token_s = max(1e-6, few.seconds - one.seconds) / max(1.0, few.of.decoded)
    t = t._replace(prompt_s=one.seconds, token_s=token_s)
    short, long, rollouts = time_sampling(t)
    step, source = expect_step(t, max(rollouts, first, key=count_longest_reply), long.of, given)
    evaluation, evaluated = time_evaluation(t, step, given)
    scoring, update = time_updates(t, rollouts, step)
    passes = Passes((short, long), scoring, update, evaluation)
    costs = scale_passes(passes, step, evaluated, x.trainer.steps)
    threads = torch.get_num_threads()
    on = f"{threads} threads, in processor time" if threads > 1 else "1 thread"
    on = "the GPU" if next(learner.model.parameters()).is_cuda else on
    played = [(long.of, step)]
    played += [(evaluation.of, evaluated)] if evaluation is not None else []
    return with_memory(t, RunCost(costs, step, source, on), update[1].of, played)


# ----------------------------------------------------------------------------------------- sampling


def time_sampling(t: Trial) -> tuple[Timed, Timed, list[Rollout]]:
    """Time two passes of sampling: with one token per reply, and with more tokens. Prompts and
    tokens are those of a step, or fewer if this would take too long.

    Returns: the two timed passes, and the rollouts of the longer pass.
    """
    prompts = max(1, min(int(BUDGET / t.prompt_s), t.x.batch.prompts))
    group_s = t.x.batch.group_size * t.token_s
    tokens = 1 + max(LEAST, int(BUDGET / (prompts * group_s)))
    limit = min(tokens, t.x.generation.max_new_tokens)
    if prompts * (t.prompt_s + limit * group_s) < CHEAP:
        sample(t, prompts, tokens, UNSCORED)
    short, _ = sample(t, prompts, 1, UNSCORED)
    long, rollouts = sample(t, prompts, tokens, t.x.reward)
    return short, long, rollouts


def expect_step(
    t: Trial, rollouts: Sequence[Rollout], played: Counts, given: Given
) -> tuple[Counts, str]:
    """Estimate the sizes of a step of the run, and say where its lengths come from.

    Args:
      rollouts: the rollouts of the check with the longest replies.
      played: the sizes of the longer pass of sampling.
      given: the lengths set by the user.
    """
    limit = t.x.generation.max_new_tokens
    own = count(rollouts)
    drawn = expect_drawn(rollouts, limit, given.reply_share)
    step = own._replace(
        groups=t.x.batch.prompts, prompt=given.prompt_tokens or played.prompt, drawn=drawn
    )
    if given.reply_share is not None:
        return step, "given"
    lengths = [rollout.response_length for rollout in rollouts]
    said = f"measured: {len(lengths)} replies of {min(lengths)} to {max(lengths)}"
    cut = f"; cut ones count as {SHARE:.0%} of generation.max_new_tokens={limit}"
    return step, said if drawn == own.drawn else said + cut


def count_longest_reply(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens in the longest reply."""
    return max(len(step.response_ids) for own in rollouts for step in own.steps)


def sample(t: Trial, prompts: int, tokens: int, reward: Reward) -> tuple[Timed, list[Rollout]]:
    """Sample the groups of the first `prompts` prompts, with at most `tokens` tokens per reply.
    Return the timed pass, and its rollouts."""
    x = t.learner.begin()
    x = x._replace(
        batch=BatchSize(prompts, x.batch.group_size),
        generation=shorten_sampling(t.x.generation, tokens),
        reward=reward,
    )
    version = t.learner.rl_step
    begun = read_clock(t.learner.model)
    sampled, _, _ = experience(
        x, t.learner.policy, t.tasks.train, StreamState(), step=0, version=version
    )
    return Timed(count(sampled), read_clock(t.learner.model) - begun), sampled


def time_evaluation(t: Trial, step: Counts, given: Given) -> tuple[Timed | None, Counts]:
    """Time greedy replies to training problems. Their number is the rollouts of a step, or fewer if
    this would take too long.

    Returns: the timed pass (None if the run evaluates nothing), and the sizes of all evaluations of
    the run.
    """
    evaluation = t.x.evaluation
    splits = t.tasks.validation, t.tasks.test
    passes = count_evaluations(t.x.trainer.steps, evaluation.every)
    tasks = sum(n * len(split) for n, split in zip(passes, splits, strict=True))
    if not tasks:
        return None, t.small._replace(groups=0)
    own = t.x.held_out(evaluation.curve_temperature)
    limit = own["max_new_tokens"]
    n = max(1, min(int(BUDGET / t.prompt_s), int(step.rollouts), tasks))
    tokens = 1 + max(LEAST, int(BUDGET / (n * t.token_s)))
    sampling = shorten_sampling(t.x.generation._replace(max_new_tokens=limit), tokens)
    own |= sampling.params | {"temperature": evaluation.curve_temperature}
    version = t.learner.rl_step
    begun = read_clock(t.learner.model)
    _, rollouts = greedy_accuracy(
        t.learner.policy, t.tasks.train[:n], seed=evaluation.seed, version=version, **own
    )
    timed = Timed(count(rollouts), read_clock(t.learner.model) - begun)
    drawn = step.drawn * limit / t.x.generation.max_new_tokens
    if given.reply_share is None and tokens >= limit:
        drawn = timed.of.drawn
    prompt = given.prompt_tokens or timed.of.prompt
    return timed, timed.of._replace(groups=tasks, prompt=prompt, drawn=drawn)


# ------------------------------------------------------------------------------------------ updates


def time_updates(
    t: Trial, rollouts: Sequence[Rollout], step: Counts
) -> tuple[tuple[Timed, Timed], tuple[Timed, Timed]]:
    """Time scoring and update, for half of the groups and for all of them. If all groups would take
    too long, use fewer groups.

    Returns: the two timed passes of scoring, and the two timed updates.
    """
    token_s = t.update_s * t.x.algorithm.epochs
    groups = len({r.group for r in rollouts})
    groups = max(1, min(groups, int(UPDATE_BUDGET / (token_s * step.packed / step.groups))))
    target = min(int(2 * UPDATE_BUDGET / token_s / step.size), round(step.drawn))
    longer = lengthen_rollouts(rollouts, target, count_vocabulary(t.learner.model))
    if token_s * groups * step.packed / step.groups < CHEAP:
        update(t, [r for r in longer if r.group < groups])
    sizes = sorted({max(1, groups // 2), groups})
    timed = [update(t, [r for r in longer if r.group < n]) for n in sizes]
    small, large = timed[0], timed[-1]
    return (small[0], large[0]), (small[1], large[1])


def update(t: Trial, rollouts: Sequence[Rollout]) -> tuple[Timed, Timed]:
    """Time one update with these rollouts. Return its scoring, and the whole update."""
    version = ((0, t.learner.rl_step),)
    own = [
        r._replace(
            reward=float((r.group + r.sample) % 2),
            steps=tuple(step._replace(versions=version) for step in r.steps),
        )
        for r in rollouts
    ]
    t.learner.begin()
    t.reads.seconds = 0.0
    begun = read_clock(t.learner.model)
    t.learner.step(own)
    of = count(own)
    return Timed(of, t.reads.seconds), Timed(of, read_clock(t.learner.model) - begun)


# ------------------------------------------------------------------------------------------- memory


def with_memory(
    t: Trial, found: RunCost, taken: Counts, played: Sequence[tuple[Counts, Counts]]
) -> RunCost:
    """Add the memory to the forecast. It is computed from the peak so far.

    Args:
      taken: the sizes of the largest update.
      played: for sampling and for evaluation: the sizes of the timed pass, and those in the run.
    """
    model = t.learner.model
    device = next(model.parameters()).device
    engine = t.x.generation.engine
    room = partial(
        size_room,
        micro=t.x.trainer.micro_batch_tokens,
        vocabulary=count_vocabulary(model),
        chunk=choose_chunk_logits(device),
        rows=engine.max_rows if isinstance(engine, Cached) else 1,
    )
    cached = [max(room(of).cached for of in own) for own in zip(*played, strict=True)]
    minibatches = t.x.algorithm.minibatches
    updates = room(taken, minibatches=minibatches), room(t.small)
    measured = Room(*map(max, *updates))._replace(cached=cached[0])
    needed = room(found.step, minibatches=minibatches)._replace(cached=cached[1])
    critic = t.learner.critic
    trunks = [model, *([critic.model] if isinstance(critic, SeparateCritic) else [])]
    # On a GPU, the cache has its whole size from the start. On a CPU it grows.
    on_cpu = device.type == "cpu"
    grows = isinstance(engine, Cached) and on_cpu
    # bytes added to a micro-batch by one more token, for rows of this width: b + c·width
    fits = [fit_activations(trunk) for trunk in trunks]
    saved = sum(b + c * round(found.step.row) for _, b, c in fits)
    size = Room(
        saved * RESIDENT if on_cpu else saved,
        LOGITS,
        count_token_bytes(base_model(model)) if grows else 0,
    )
    so_far = peak_memory(device) * 2**30 + (IMPORTS if on_cpu else 0)
    return found._replace(
        peak=forecast_peak(so_far, measured, needed, size),
        activations=size.tokens * needed.tokens + size.logits * needed.logits,
        cache=size.cached * needed.cached,
    )


def count_vocabulary(model: Any) -> int:
    """Return the number of logits per token."""
    return split_model(model)[1].weight.shape[0]


def shorten_sampling(sampling: Sampling, tokens: int) -> Sampling:
    """Limit the sampling settings to at most `tokens` tokens per reply. Drop a thinking budget that
    is not below this limit."""
    tokens = min(tokens, sampling.max_new_tokens)
    budget = sampling.max_thinking_tokens
    kept = budget if budget is not None and budget < tokens else None
    return sampling._replace(max_new_tokens=tokens, max_thinking_tokens=kept)


def lengthen_rollouts(rollouts: Sequence[Rollout], tokens: int, vocabulary: int) -> list[Rollout]:
    """Lengthen the last reply of each rollout truncated by length to at least `tokens` tokens.

    The reply's own token ids are repeated, plus the number of the sample. So no two samples share
    the new tokens.
    """
    out = []
    for rollout in rollouts:
        *earlier, last = rollout.steps or (None,)
        if last is not None and rollout.truncation == "length":
            ids = last.response_ids
            more = range(len(ids), tokens)
            last = last._replace(
                response_ids=(
                    *ids,
                    *((ids[i % len(ids)] + rollout.sample) % vocabulary for i in more),
                ),
                logprobs=(*last.logprobs, *(last.logprobs[i % len(ids)] for i in more)),
            )
            rollout = rollout._replace(steps=(*earlier, last))
        out.append(rollout)
    return out
