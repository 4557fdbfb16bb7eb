"""`rlkit check`: one small step of a run, through every part of it, and what the run would take; nothing is kept.

The config is composed and dry-run before, as for `rlkit train`. Here the rows are tried with the verifier, the model is loaded, trainer
and sampler are compared, one prompt's group is played and scored, and the policy (and the critic, where there is one) takes one step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlkit.commands.arguments import Arguments
from rlkit.errors import ConfigError
from rlkit.rewards import Reward, Term
from rlkit.rewards import score as score_rollouts
from rlkit.training.experiment import BatchSize, Experiment
from rlkit.types import Rollout, Splits, Task

REPLY = 64  # tokens of a reply here; a run's own limit may take minutes on a CPU
GROUP = 4  # rollouts where a group is one sample
WIDTH = 512  # tokens of the rows at most whose memory is measured
WORST = 4  # such rows
LOSS = 64  # [B, T] tensors of the loss and its backward pass, generously


class Memory(NamedTuple):
    """Bytes that a run holds at most. Weights, gradients, optimizer and reference are counted; the rest is worked out, never too low."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    saved: int  # by autograd, for the backward pass of one full micro-batch whose rows share nothing
    working: int  # logits of a chunk and what the backward pass of a layer needs besides
    cache: int  # keys and values of all episodes of a step, each as long as it may become

    @property
    def peak(self) -> int:
        """What is there at once at most: sampling, the backward pass and the optimizer, which may copy the gradients, take turns."""
        update = self.gradients + max(self.saved + self.working, self.gradients)
        return self.weights + self.optimizer + self.reference + max(self.cache, update)


class Report(NamedTuple):
    """What `run` found."""

    warnings: list[str]
    rollouts: list[Rollout]  # played, with their own rewards
    spread: bool  # whether the update needed rewards that differ, and was given such
    metrics: Mapping[str, Any]
    memory: Memory
    seconds: Mapping[str, float]
    header: str


def small(x: Experiment) -> Experiment:
    """The experiment cut to one step of one update on one prompt: short replies, no evaluation, no logger, no callbacks."""
    from rlkit.training.schedules import Schedule

    limit = min(x.generation.max_new_tokens, REPLY)
    budget = x.generation.max_thinking_tokens
    return x._replace(
        batch=BatchSize(max(1, GROUP // x.batch.group_size), x.batch.group_size),
        generation=x.generation._replace(max_new_tokens=limit, max_thinking_tokens=None if budget is None else min(budget, limit - 1)),
        algorithm=x.algorithm._replace(epochs=1, minibatches=1, max_refills=0, critic=x.algorithm.critic._replace(warmup=0)),
        trainer=x.trainer._replace(steps=1, max_time=None),
        evaluation=x.evaluation._replace(n=0, stop_at=None),
        schedule=Schedule(),
        logger={},
        callbacks={},
    )


def run(x: Experiment, tasks: Splits) -> Report:
    """One step of the experiment.

    Args:
      x: the whole run at its first step, without open schedules (rlkit.config.problems.schedules.first_steps).
      tasks: at least one training row; the others are only counted.
    Raises: the refusals of a run.
    """
    from rlkit.episodes.stream import StreamState
    from rlkit.system.deadline import process_ends_after
    from rlkit.system.device import autocast, pick_device, quiet, use_threads
    from rlkit.training.experience import experience
    from rlkit.training.learner import Learner
    from rlkit.training.memory import probe
    from rlkit.training.run import header
    from rlkit.training.selfcheck import check_policy, check_teacher

    quiet()
    import torch

    clock = {}
    started = time.perf_counter()
    device = pick_device(x)
    torch.manual_seed(x.seed)
    check_teacher(x)
    policy = x.model(device=device)
    use_threads(x.trainer, policy.model, device)
    text = header(x, policy, device, tasks)
    clock["load"] = time.perf_counter() - started
    cut = small(x)
    with autocast(cut, device):
        agreement = check_policy(policy, tasks.train, cut)
    played: list[Rollout] = []
    learner = Learner(cut._replace(reward=telling(cut.reward, played)), policy, exact=agreement.exact)
    limit = x.trainer.max_step_time
    with (
        autocast(cut, device, updates=True),
        process_ends_after(limit, lambda: f"step 1 hangs: nothing within trainer.max_step_time={limit:g} minutes"),
    ):
        if device.type == "cuda":
            probe(learner, tasks.train)
        sampled, trained, _ = experience(learner.begin(), policy, tasks.train, StreamState(), step=0, clock=learner.clock)
        metrics = learner.step(sampled, trained)
        found = memory(x, learner, tasks.train, played)
    clock["generate"], clock["update"] = metrics["perf/generate_s"], metrics["perf/update_s"]
    spread = len({r.total_reward for r in played}) == 1
    return Report(agreement.warnings, played, spread, metrics, found, clock, text)


def telling(reward: Reward, played: list[Rollout]) -> Reward:
    """A reward that keeps the scored rollouts in `played`, and gives 0 and 1 in turn where all are worth the same: no algorithm would
    take a step on those."""

    def scores(rollouts: Sequence[Rollout]) -> list[float | None]:
        played[:] = score_rollouts(rollouts, reward)
        own = [r.total_reward for r in played]
        return [float(i % 2) for i in range(len(own))] if len(set(own)) == 1 else own

    return Reward(reward.name, {"check": Term(1.0, scores, batched=True)})


# -------------------------------------------------------------------------------------------------------- memory


class Kept:
    """Bytes that autograd keeps for backward passes, the weights themselves aside: those of now, and the most there were at once."""

    def __init__(self, module: Any) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.users: dict[int, int] = {}  # storage → tensors in it that are kept
        self.now = self.peak = 0

    def keep(self, tensor: Any) -> _Saved:
        """A tensor as autograd may hold it until the backward pass has come by."""
        return _Saved(self, tensor)


class _Saved:
    """One saved tensor; that it is gone means that the backward pass is done with it."""

    def __init__(self, kept: Kept, tensor: Any) -> None:
        self.kept, self.tensor = kept, tensor
        self.place, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if self.place not in kept.weights:
            kept.users[self.place] = kept.users.get(self.place, 0) + 1
            if kept.users[self.place] == 1:
                kept.now += self.size
                kept.peak = max(kept.peak, kept.now)

    def __del__(self) -> None:
        if self.place not in self.kept.weights:
            self.kept.users[self.place] -= 1
            if not self.kept.users[self.place]:
                self.kept.now -= self.size


@contextmanager
def saved_for_backward(module: Any) -> Iterator[Kept]:
    """Counts what autograd keeps inside of the block; each storage once."""
    import torch

    kept = Kept(module)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda saved: saved.tensor):
        yield kept


def memory(x: Experiment, learner: Any, tasks: Sequence[Task], played: Sequence[Rollout]) -> Memory:
    """What the whole run takes at most, from a learner that has taken its one small step, with the rollouts `played`."""
    trained = [p for p in learner.nets.parameters() if p.requires_grad]
    weights = size_of([list(learner.nets.parameters()), list(learner.nets.buffers())])
    optimizer = sum(size_of(o.state) for o in learner.optimizers)
    together = size_of([list(learner.nets.parameters()), list(learner.nets.buffers()), learner.references])
    longest = min(learner.policy.context_length, episode_length(x, learner, tasks, played))
    rollouts = x.batch.prompts * x.batch.group_size
    portion = min(max(x.trainer.micro_batch_tokens, longest), rollouts * longest)  # a micro-batch is at least one rollout
    engine = getattr(x.generation.engine, "keywords", {})
    cached = min(longest * min(rollouts, engine.get("max_rows", rollouts)), engine.get("max_cached_tokens", rollouts * longest))
    saved = saved_of_rows(learner, portion, longest)
    return Memory(
        weights=weights,
        gradients=sum(p.numel() * p.element_size() for p in trained),
        optimizer=optimizer,
        reference=together - weights,
        saved=saved,
        working=working_of(learner, portion) + saved // learner.policy.model.config.num_hidden_layers,
        cache=cache_bytes(learner.policy.model) * cached,
    )


def saved_of_rows(learner: Any, tokens: int, longest: int) -> int:
    """Bytes that autograd keeps for `tokens` tokens in rows of up to `longest` tokens, of the kind that takes the most.

    Measured on rows of few tokens, and carried on: linear layers keep as much for every token, attention masks for every pair of tokens
    of a row. Under gradient checkpointing the input of every layer is kept, which no hook sees, and the backward pass of one layer comes
    on top, as much as it keeps without.
    """
    config = learner.policy.model.config
    widths = (min(longest, WIDTH) // 2, min(longest, WIDTH))
    layers = [m for m in learner.nets.modules() if getattr(m, "gradient_checkpointing", False)]
    total = _carried_on(widths, [_kept_by(learner, width) for width in widths], tokens, longest)
    if not layers:
        return total
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        whole = _carried_on(widths, [_kept_by(learner, width) for width in widths], tokens, longest)
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
    inputs = 4 * tokens * config.num_hidden_layers * config.hidden_size
    return total + inputs + whole // config.num_hidden_layers


def _carried_on(widths: tuple[int, int], kept: Sequence[float], tokens: int, longest: int) -> int:
    """Bytes a token at two widths, as a line in the width, at the width `longest`; times the tokens."""
    slope = max(0.0, (kept[1] - kept[0]) / (widths[1] - widths[0]))
    return int(tokens * (max(kept) + slope * (longest - widths[1])))


def _kept_by(learner: Any, width: int) -> float:
    """Bytes a token that autograd keeps of policy and critic for rows as they are at worst.

    They share their first token alone, so that attention needs a mask and every token counts; all but one are so long that they are
    padded by as much as the packing pads.
    """
    import torch

    from rlkit.models.packing import pack, size_class
    from rlkit.models.score import states

    short = next(n for n in range(2, width + 1) if size_class(n) == size_class(width))
    ids = (torch.arange(WORST)[:, None] * 7 + torch.arange(width + 1)) % learner.policy.model.get_input_embeddings().num_embeddings
    ids[:, 0] = 0
    mask = torch.arange(width + 1).expand(WORST, -1) >= 1
    mask = mask & ((torch.arange(WORST)[:, None] == 0) | (torch.arange(width + 1) <= short))
    packed = pack(ids.to(learner.device), mask.to(learner.device))
    with torch.enable_grad(), saved_for_backward(learner.nets) as kept:
        hidden = states(learner.model, packed)
        values = learner.critic(hidden, packed) if learner.x.algorithm.critic.active else None
        peak = kept.peak + size_of([hidden, values])
    return peak / packed.tokens


def working_of(learner: Any, tokens: int) -> int:
    """Bytes for the logits of a chunk, their log-softmax, its gradient and theirs, and what the loss keeps of every token."""
    from rlkit.models.score import CHUNK_LOGITS

    vocabulary = learner.policy.model.get_output_embeddings().weight.shape[0]
    return 4 * (4 * min(tokens * vocabulary, CHUNK_LOGITS) + LOSS * tokens)


def size_of(node: Any) -> int:
    """Bytes of all tensors in a nest of modules, mappings, tuples and lists; what two of them share counts once."""
    import torch

    sizes: dict[int, int] = {}
    pending = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, torch.nn.Module):
            pending += [*item.parameters(), *item.buffers()]
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, tuple | list):
            pending += item
    return sum(sizes.values())


def cache_bytes(model: Any) -> int:
    """Keys and values of one token in all layers, in bytes."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * next(model.parameters()).element_size()


def episode_length(x: Experiment, learner: Any, tasks: Sequence[Task], played: Sequence[Rollout]) -> int:
    """Tokens that an episode may come to: the longest prompt, as many replies as may be, each as long as it may be, and between any two
    of them the most that was said between two of those `played`."""
    from rlkit.environments import environment_of
    from rlkit.episodes.episode import opening
    from rlkit.models import encode_prompt

    longest = max(tasks, key=lambda task: sum(len(m["content"]) for m in task.messages))
    own = environment_of(x.environment, longest)
    begun = opening(longest, own)
    prompt = len(encode_prompt(learner.policy.codec, begun.prompt, begun.schemas))
    turns = ((a, b) for r in played for a, b in zip(r.steps, r.steps[1:], strict=False))
    said = max((len(b.prompt_ids) - len(a.prompt_ids) - len(a.response_ids) for a, b in turns), default=0)
    return prompt + own.max_steps * x.generation.max_new_tokens + (own.max_steps - 1) * max(said, 0)


# ------------------------------------------------------------------------------------------------------- telling


def show(report: Report, *, phases: Sequence[str] = ()) -> str:
    """The report in lines: what was done, with its numbers, then memory."""
    m, clock, memory = report.metrics, report.seconds, report.memory
    own = [r.total_reward for r in report.rollouts]
    scored = [r for r in own if r is not None]
    terms = ", ".join(f"{name} {_mean([r.rewards.get(name) for r in report.rollouts])}" for name in report.rollouts[0].rewards)
    names = {"loss/total": "loss", "optim/grad_norm": "gradient norm", "kl/estimate": "KL", "value/loss": "value loss"}
    numbers = ", ".join(f"{label} {m[key]:.3g}" for key, label in names.items() if isinstance(m.get(key), float) and m[key] == m[key])
    rows = [
        ("config", "composed, checked, dry-run on fake data" + (f", phase by phase ({', '.join(phases)})" if len(phases) > 1 else "")),
        ("data", "gold answers score 1, empty ones do not"),
        ("model", f"loaded in {clock['load']:.1f} s; trainer and sampler agree"),
        *(("warning", line) for line in report.warnings),
        ("rollout", f"{len(report.rollouts)} episodes, {m['tokens/sampled']} tokens sampled, {clock['generate']:.1f} s"),
        ("reward", f"{_mean(own)} ({terms}), {len(scored)} of {len(own)} can be scored"),
        ("update", (numbers if m["optim/updates"] else "none: this step had nothing to learn from") + f", {clock['update']:.1f} s"),
        *([("", "all rewards were equal, so 0 and 1 in turn stood for them")] if report.spread else []),
        *((f"memory: {name}", _size(getattr(memory, name))) for name in memory._fields if getattr(memory, name)),
        (
            "memory: in all",
            f"{_size(memory.peak)} at most: micro_batch_tokens full of the longest episodes; the framework comes on top",
        ),
    ]
    if len(phases) > 1:
        rows.append(("phases", f"the step was one of '{phases[0]}'; the others were tried on fake data only"))
    return "\n".join([report.header, "", *(f"{name:<18}{text}" for name, text in rows), "", "ready: rlkit train with the same overrides"])


def _mean(values: Sequence[float | None]) -> str:
    found = [v for v in values if v is not None]
    return f"{sum(found) / len(found):.2f}" if found else "not scored"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def command(arguments: Arguments) -> int:
    """What `rlkit train` would do with these overrides, in one small step."""
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.doubts import warnings
    from rlkit.config.problems.rows import load_tasks
    from rlkit.config.problems.schedules import first_steps
    from rlkit.tasks.splits import overlaps
    from rlkit.training.loggers import check_loggers

    if arguments.multirun:
        raise ConfigError("rlkit check tries one run at a time; rlkit train -m checks every job of a sweep before the first one starts")
    x = experiment(compose(arguments.overrides, config_dir=arguments.config_dir))
    check_loggers(x.logger)
    tasks = load_tasks(x)
    for line in (*warnings(x), *overlaps(tasks)):
        print(f"warning: {line}")
    firsts = first_steps(x)
    report = run(next(iter(firsts.values())), tasks)
    print(show(report, phases=list(firsts)))
    return 0
