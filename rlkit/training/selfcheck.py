"""Invariants proved on the run's own model, tokenizer and rows before the first step. Each is a class of silent bugs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.config.assumptions import assumption_problems
from rlkit.environments import environment_of
from rlkit.episodes import assemble, collect
from rlkit.episodes.episode import opening
from rlkit.episodes.summary import by_part
from rlkit.errors import ConfigError, DataError, SelfCheckError
from rlkit.functional import token_log_probs
from rlkit.models import check_template, check_vocabulary, encode_prompt, pack, score
from rlkit.rewards import Reward, RewardError, tests_of
from rlkit.rewards import score as score_rollouts
from rlkit.rewards.truths import truth_problems
from rlkit.sandbox import Sandbox, require
from rlkit.training.experiment import Experiment
from rlkit.training.schedules import phases
from rlkit.types import Environment, Policy, Rollout, Step, Task, declarations

FP32_TOLERANCE = 1e-3  # max |Δ log-prob|: two correct float32 paths differ by rounding alone
BF16_WARNING = 0.05  # mean |Δ log-prob| in half precision: more than its rounding
BF16_LIMIT = 0.5  # mean |Δ log-prob| in half precision: other numbers, not other rounding
FORWARD_ROWS = 4  # rows that the model's own forward reads for the comparison
ROWS = 32  # of the data that are tried with the verifier
JUDGED = ("environment", "verifiers")  # rewards of rows without a gold answer
LONGEST = 4  # rows by characters whose prompts are measured in tokens


def check_verifier(tasks: Sequence[Task], reward: Reward) -> None:
    """The verifier gives gold answers 1 and an empty answer 0, on the first rows. Rows that bring their own judge have no gold answer.

    The tests of programs are read in every row.
    Raises: DataError naming the row, and the test that cannot be judged outside the program.
    """
    for task in tasks:
        if task.reward == "code_exec":
            tests_of(task)
    for task in first_rows([task for task in tasks if task.reward not in JUDGED], ROWS):
        gold, empty = (_answered(task, text) for text in (task.answer, ""))
        scores = [r.reward for r in score_rollouts([gold, empty], reward)]
        if scores[0] is None or scores[0] < 1:
            raise DataError(f"row {task.id}: the gold answer '{task.answer[:80]}' scores {scores[0]} with reward '{task.reward}', not 1; "
                            "mend the row's answer, or name a reward that can score it")  # fmt: skip
        if scores[1] is not None and scores[1] >= 1:
            raise DataError(f"row {task.id}: an empty answer scores {scores[1]} with reward '{task.reward}'; it must not count as right")


def check_truths(tasks: Sequence[Task], reward: Reward) -> None:
    """Every row's truth can be read by the terms of the reward that compare with it, on all rows: a row that cannot would be left out of
    every step without a word. A term of weight 0 is only logged, and not asked.

    Raises: DataError naming the row, and how many there are.
    """
    asked = [truth_problems(term.fn, tasks) for term in reward.terms.values() if term.weight]
    problems = [next(filter(None, said), "") for said in zip(*asked, strict=True)] if asked else []
    found = [(task, problem) for task, problem in zip(tasks, problems, strict=False) if problem]
    if found:
        task, problem = found[0]
        more = f" ({len(found) - 1} more rows are like it)" if len(found) > 1 else ""
        raise DataError(f"row {task.id}: the gold answer '{task.answer[:80]}' of reward '{task.reward}' {problem}{more}")


def check_assumptions(tasks: Sequence[Task], x: Experiment) -> None:
    """What the parts assume holds with the rewards that the rows name (rlkit.config.assumptions). Raises: ConfigError with all problems."""
    if problems := assumption_problems(x, tasks):
        raise ConfigError("\n".join(problems))


def check_teacher(x: Experiment) -> None:
    """A reference that is another model has the policy's vocabulary; looked at before weights are loaded. Raises: ConfigError."""
    own = getattr(x.model, "keywords", {})
    for phase in phases(x).values():
        init = phase.reference.init
        if "path" in own and phase.needs_reference and "same_vocabulary" in (declarations(init, "assumes") or ()):
            hub = {key: own[key] for key in ("revision", "trust_remote_code") if key in own}
            check_vocabulary(own["path"], init.keywords["path"], teacher_revision=init.keywords["revision"], **hub)


def check_reward(tasks: Sequence[Task], reward: Reward) -> None:
    """The training reward runs, and can score at least one of the first rows, of every part of a mixture, with their gold answers.

    Raises: ConfigError where a term raises or none can be scored; so a broken reward is found before a model is loaded.
    """
    gold = [_answered(task, task.answer) for task in first_rows(tasks, ROWS)]
    try:
        scored = score_rollouts(gold, reward)
    except RewardError as error:
        raise ConfigError(f"reward={reward.name}: {error}") from error
    for own in (by_part(scored) or {"": scored}).values():
        if all(r.reward is None for r in own):
            raise ConfigError(
                f"reward={reward.name}: it can score none of the first {len(own)} rows (the first is {own[0].task.id}); "
                "choose a reward that fits the task, or reward=by_task"
            )


def check_tools(tasks: Sequence[Task], environment: Environment | Callable[[Task], Environment]) -> None:
    """Tools that run model-written code get the isolation that they ask for, wherever the data's environments have any.

    Raises: ConfigError, before a model is loaded.
    """
    for task in {task.environment: task for task in tasks}.values():
        for tool in opening(task, environment_of(environment, task)).tools.values():
            if isinstance(sandbox := getattr(tool, "sandbox", None), Sandbox):
                require(sandbox)


def first_rows(tasks: Sequence[Task], n: int) -> list[Task]:
    """The first n tasks; of a mixture the first n of every part."""
    seen: Counter[str] = Counter()
    out = []
    for task in tasks:
        seen[task.part] += 1
        if seen[task.part] <= n:
            out.append(task)
    return out


def _answered(task: Task, text: str) -> Rollout:
    step = Step(prompt=task.messages, prompt_ids=(), response_ids=(), logprobs=(), finish_reason="stop", content=text)
    return Rollout(task, (step,))


def check_contexts(policy: Policy, tasks: Sequence[Task], environment: Environment | Callable[[Task], Environment]) -> None:
    """The template carries the rows' tools, and the longest rows leave room for a reply.

    Raises: TemplateError, DataError naming the row.
    """
    for task in first_rows(sorted(tasks, key=lambda task: -sum(len(m["content"]) for m in task.messages)), LONGEST):
        own = opening(task, environment_of(environment, task))
        check_template(policy.codec, own.schemas)
        length = len(encode_prompt(policy.codec, own.prompt, own.schemas))
        if length >= policy.context_length:
            raise DataError(
                f"row {task.id}: its prompt has {length} tokens, and the model's context is {policy.context_length}; "
                "take the row out, or choose a model with a longer context (model.path)"
            )


class Agreement(NamedTuple):
    """How well sampler, trainer and the model's own forward agree, where they agree well enough to train."""

    warnings: list[str]
    exact: bool  # in float32, within FP32_TOLERANCE


def check_policy(policy: Policy, tasks: Sequence[Task], x: Experiment) -> Agreement:
    """Token exactness on real rollouts: the template carries tools, and three computations agree on every sampled token.

    They are the engine that sampled, the trainer's `score`, and the model's own forward, whichever engine it is: an engine that
    shares a mistake with the trainer would agree with it.
    Raises: TemplateError, DataError, SelfCheckError.
    """
    few = [*tasks[:2], *first_rows(tasks, 1)[2:]]
    check_contexts(policy, tasks, x.environment)
    temperature = x.generation.temperature or 1.0
    rollouts = collect(
        policy, few, engine=x.generation.engine, environment=x.environment, group_size=2, seed=x.seed,
        **x.generation._replace(temperature=temperature, max_new_tokens=min(x.generation.max_new_tokens, 32)).params,
    )  # fmt: skip
    device = next(policy.model.parameters()).device
    batch = assemble(rollouts, pad_token_id=policy.pad_token_id, device=device)
    mask, sampled = batch.response_mask, sum(r.response_length for r in rollouts)
    if int(mask.sum()) != sampled:
        raise SelfCheckError(f"the loss mask has {int(mask.sum())} tokens, {sampled} were sampled")
    few_rows = mask.any(1).nonzero()[:FORWARD_ROWS, 0]
    with torch.no_grad():
        logprobs = score(policy.model, pack(batch.ids, mask), temperature=temperature).logprobs
        own = own_log_probs(policy.model, batch.ids[few_rows], mask[few_rows], temperature)
    half = torch.is_autocast_enabled(device.type) or any(p.dtype == torch.bfloat16 for p in policy.model.parameters())
    warnings = _compare(
        logprobs[few_rows][mask[few_rows]] - own, half, "the trainer and the model's own forward",
        f"the trainer would learn from other probabilities than {type(policy.model).__name__} has. Does its forward change the last "
        "hidden states or the logits in a way that its class does not show, or has it dropout?",
    )  # fmt: skip
    warnings += _compare(
        (logprobs - batch.logprobs_sampler)[mask], half, "sampler and trainer",
        "training would be wrong. Does the engine sample at generation.temperature, and from these weights?",
    )  # fmt: skip
    return Agreement(warnings, exact=not half)


def own_log_probs(model: Any, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Log-probs [M] of the tokens that `mask` marks, at least one a row, by the model's own forward, row by row, without padding.

    Logits are asked for from the first of these tokens on, where the model can leave the others out.
    """
    options = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    parts = []
    for row, marks in zip(ids, mask, strict=True):
        places = marks.nonzero()[:, 0]
        last, kept = int(places[-1]), int(places[-1] - places[0]) + 1
        few = {"logits_to_keep": kept} if "logits_to_keep" in options else {}
        logits = model(input_ids=row[None, :last], use_cache=False, **few).logits[0, -kept:]
        parts.append(token_log_probs(logits[places - places[0]], row[places], temperature=temperature))
    return torch.cat(parts)


def _compare(gap: Tensor, half: bool, who: str, why: str) -> list[str]:
    """Warnings where two computations of the same log-probs differ by `gap`. Raises: SelfCheckError where they differ too much."""
    mean, most = float(gap.abs().mean()), float(gap.abs().max())
    if not half and not most < FP32_TOLERANCE:
        raise SelfCheckError(f"the log-probs of {who} differ by up to {most:.2e} nats, more than {FP32_TOLERANCE}: {why}")
    if half and not mean <= BF16_LIMIT:
        raise SelfCheckError(f"the log-probs of {who} differ by {mean:.3f} nats a token on average, more than {BF16_LIMIT}: {why}")
    if half and mean > BF16_WARNING:
        return [f"the log-probs of {who} differ by {mean:.3f} nats a token on average; rounding to bfloat16 stays below {BF16_WARNING}"]
    return []
