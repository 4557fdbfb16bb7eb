"""Time passes of a run's own parts, so that `rlkit check` can forecast the run's cost here.

After one small step, a learner times sampling, updates and an evaluation, at the run's size if this
is cheap and at a part of it otherwise. Seconds are the processor's or, on a GPU, the clock's.
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

BUDGET = 4.0  # about the most seconds of a timed pass of sampling
UPDATE_BUDGET = 8.0  # the same of an update
CHEAP = 1.0  # seconds of a pass worth an untimed first run; dearer ones warm up by smaller passes
LEAST = 4  # tokens after the first of a reply in the longer pass of sampling
# Bytes on a CPU of modules imported by a run and not by a check, mostly Lightning; measured.
IMPORTS = 70 << 20
# Resident bytes on a CPU for each byte kept by autograd. torch asks for aligned blocks, and glibc
# reuses no freed block of the same size for them. Measured with glibc 2.36: 1.6 to 1.7.
RESIDENT = 1.7
# replies of one token are not sent to a verifier
UNSCORED = Reward("none", {"none": Term(1.0, lambda own: [0.0] * len(own), batched=True)})


class Given(NamedTuple):
    """Lengths set by the user, check.NAME; None leaves them to the check."""

    prompt_tokens: float | None = None
    reply_share: float | None = None


class RunCost(NamedTuple):
    """The forecast cost of a run."""

    costs: Costs
    step: Counts
    source: str  # of the lengths, in words
    on: str  # the processor, in words
    peak: float = 0.0  # bytes
    activations: float = 0.0  # of them, of one micro-batch with its logits
    cache: float = 0.0  # of them, of keys and values


class Reads:
    """The forward passes of a learner (`Host.forward`). It adds up the seconds of passes without
    gradient."""

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
    """Seconds of this process's work on a model so far."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Trial(NamedTuple):
    """A learner after its small step, and the run behind it."""

    learner: Learner  # its host's forward passes are `reads`
    x: Experiment  # the run at its first step
    tasks: Splits
    reads: Reads
    small: Counts  # of the small step
    update_s: float  # seconds a token of its update
    prompt_s: float = 0.0  # seconds of one prompt's samples, with one token a reply
    token_s: float = 0.0  # of a decoded token beside those of one group


def forecast_run(
    learner: Learner, x: Experiment, tasks: Splits, reads: Reads, given: Given
) -> RunCost:
    """Time the passes and scale them to the run. The learner's weights move.

    The caller sets any precision other than that of the weights, as in `Learner`.

    Args:
      learner: after one small step; `reads` are its host's forward passes. x: the run at its first
        step.
    """
    small = count(learner.rollouts)
    spent = learner.metrics["perf/update_processor_s"]  # nan on a GPU
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
    """Time the prompts of a step, or as many as are cheap, with one token a reply, and with as many
    tokens as are cheap. Return both, and the longer replies."""
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
    """Expect the sizes of a step of the run; say where the lengths are from.

    Args:
      rollouts: the longest of the check. played: by the longer pass of sampling.
    """
    limit = t.x.generation.max_new_tokens
    own = count(rollouts)
    drawn = expect_drawn(rollouts, limit, given.reply_share)
    step = own._replace(
        groups=t.x.batch.prompts, prompt=given.prompt_tokens or played.prompt, drawn=drawn
    )
    if given.reply_share is not None:
        return step, "given"
    cut = f"replies that were cut count as {SHARE:.0%} of generation.max_new_tokens={limit}"
    return step, "measured" if drawn == own.drawn else cut


def count_longest_reply(rollouts: Sequence[Rollout]) -> int:
    """Tokens of the longest reply."""
    return max(len(step.response_ids) for own in rollouts for step in own.steps)


def sample(t: Trial, prompts: int, tokens: int, reward: Reward) -> tuple[Timed, list[Rollout]]:
    """Groups of the first prompts, with at most so many tokens a reply."""
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
    """Time greedy replies to training problems, as many as a step has rollouts or as are cheap.
    Return this pass, and the sizes of all evaluations of the run."""
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
    """Time scoring and update of all cheap groups, and of half of them."""
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
    """Time scoring and a whole update of these rollouts."""
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
    """Add the memory to the forecast, from the peak so far.

    Args:
      taken: of the largest update. played: of sampling and evaluation, here and in the run.
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
    # on a GPU the cache has its whole size from the start
    on_cpu = device.type == "cpu"
    grows = isinstance(engine, Cached) and on_cpu
    # bytes that one more token adds to a micro-batch of these rows: b + c·width
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
    """Entries of the logits of a token."""
    return split_model(model)[1].weight.shape[0]


def shorten_sampling(sampling: Sampling, tokens: int) -> Sampling:
    """Limit the settings to so many tokens a reply, and drop a thinking budget out of reach of this
    limit."""
    tokens = min(tokens, sampling.max_new_tokens)
    budget = sampling.max_thinking_tokens
    kept = budget if budget is not None and budget < tokens else None
    return sampling._replace(max_new_tokens=tokens, max_thinking_tokens=kept)


def lengthen_rollouts(rollouts: Sequence[Rollout], tokens: int, vocabulary: int) -> list[Rollout]:
    """Lengthen the last reply of each cut rollout to at least so many tokens.

    The reply's own tokens repeat, moved by the number of the sample, so that no two samples share
    them.
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
