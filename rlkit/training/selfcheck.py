"""Check the run's own model, tokenizer and data rows before the first step. Each check rules out
one class of silent bugs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.engines.transformers import use_sampling_mode
from rlkit.environments import Setting, find_environment, name_tools
from rlkit.episodes import assemble, collect, count_failures
from rlkit.episodes.episode import read_opening
from rlkit.errors import DataError, SelfCheckError, show_controls
from rlkit.functional import token_log_probs
from rlkit.models import (
    check_template,
    check_vocabulary,
    decode,
    encode_prompt,
    forward_logprobs,
    has_tool_prompt,
    pack,
)
from rlkit.system.adapters import base_model
from rlkit.training.experiment import Experiment
from rlkit.training.schedules import list_phases
from rlkit.types import Policy, Task, Tool, bound, declarations

FP32_TOLERANCE = 1e-3  # largest |Δ log-prob|: two correct float32 paths differ only by rounding
# The following limits are for the mean of |Δ log-prob| in half precision.
BF16_LIMIT = 0.5  # more than any rounding
MARGIN = 1.2  # warn above MARGIN · the difference between the model's own two paths
# The difference between the two paths of SmolLM2-135M. If a difference was measured on fewer than
# FEW tokens, it counts as at least this.
TYPICAL = 0.05
FEW = 64  # with this many tokens the mean is accurate to about one eighth of its value
# The unit roundoff of bfloat16. A difference between two paths counts as at least this value.
# Logits from 8 to 16 are rounded to multiples of 1/16. Therefore the mean reaches this value if one
# token in 16 is rounded up in one path and down in the other.
ROUNDOFF = 2**-8
FORWARD_ROWS = 4  # number of rows that the model's own forward reads for the comparison
FORWARD_TOKENS = 32  # tokens of each of these rows that are read one by one
ROWS = 32  # number of data rows that the verifier is tried on
LONGEST = 4  # number of longest rows (in characters) whose prompts are measured in tokens


def check_teacher(x: Experiment) -> None:
    """Check that references and teachers have the policy's vocabulary, in this process or in
    another process that serves them. The check happens before weights are loaded. Raise ConfigError
    if a vocabulary differs."""
    path = x.model.path
    if path is None:
        return
    hub = x.model.hub
    asked = [phase.reference for phase in list_phases(x).values() if phase.needs_reference]
    asked += x.teacher.models.values() if x.needs_teacher else ()
    for reference in asked:
        if reference.check is not None:
            reference.check(path, **hub)
        if "same_vocabulary" in (declarations(reference.init, "assumes") or ()):
            given = bound(reference.init)
            revision = given["revision"]
            check_vocabulary(
                path, given["path"], teacher_revision=revision, key=given["key"], **hub
            )


def select_first_rows(tasks: Sequence[Task], n: int) -> list[Task]:
    """Select the first n tasks of every part of a mixture, and of every environment named by its
    rows."""
    seen: Counter[tuple[str, str]] = Counter()
    out = []
    for task in tasks:
        kind = task.part, task.environment
        seen[kind] += 1
        if seen[kind] <= n:
            out.append(task)
    return out


def check_contexts(policy: Policy, tasks: Sequence[Task], environment: Setting) -> tuple[str, str]:
    """Check that the chat template shows the rows' tools. Check also that even the longest prompts
    leave room for a reply in the model's context.

    Returns: two texts. The first text has lines, with line ends, about the tools of these rows and
      the form of the tool prompt. If no row has tools, this text is empty. The second text shows
      the policy's first prompt for a row of each part of the data mixture, and of each environment.
    Raises: TemplateError, and DataError naming the row.
    """
    tools: dict[str, Tool] = {}
    read: dict[tuple[str, str], str] = {}
    by_length = sorted(
        tasks, key=lambda task: -sum(len(m.get("content") or "") for m in task.messages)
    )
    for task in select_first_rows(by_length, LONGEST):
        own = read_opening(task, find_environment(environment, task))
        check_template(policy.renderer, own.schemas)
        tools |= own.tools
        ids = encode_prompt(policy.renderer, own.prompt, own.schemas)
        if len(ids) >= policy.context_length:
            raise DataError(
                f"row {task.id}: its prompt has {len(ids)} tokens, and the model's context is"
                f" {policy.context_length}; take the row out, or choose a model with a longer"
                " context (model.path)"
            )
        text = show_controls(decode(policy.renderer, ids), kept="\n")
        read[task.part, task.environment] = f"=== row {task.id}\n{text}\n"
    prompted = has_tool_prompt(policy.renderer.tokenizer)
    form = "rlkit's (model.tools=prompt)" if prompted else "the template's (model.tools=template)"
    lines = f"tools: {name_tools(tools)}\ntool prompt: {form}\n" if tools else ""
    return lines, "".join(read.values())


class Agreement(NamedTuple):
    """Say how well the log-probs of the sampling engine, the trainer and the model's own forward
    agree. If they do not agree well enough to train, `check_policy` raises an error instead of
    returning this record."""

    warnings: list[str]
    exact: bool  # whether the log-probs agree in float32, within FP32_TOLERANCE
    tools: str  # the lines of `check_contexts`
    prompts: str  # the first prompts from `check_contexts`
    bound: float | None  # a mean |Δ log-prob| above this gives a warning; None in float32


def check_policy(policy: Policy, tasks: Sequence[Task], x: Experiment) -> Agreement:
    """Check a run on real rollouts before its first step. The chat template must show the tools,
    and three computations of every sampled token's log-prob must agree.

    The three computations are the sampling engine, the trainer's `forward_logprobs`, and the
    model's own forward. The model's own forward is needed because an engine with the trainer's
    mistake would agree with the trainer. In float32 the log-probs of every token may differ by at
    most FP32_TOLERANCE.

    In half precision the model is first compared with itself. It reads some rows once as whole
    sequences, and once token by token (`measure_rounding`). If the mean difference between two
    computations exceeds MARGIN times this model's own difference, the check prints a warning. If
    the mean difference exceeds BF16_LIMIT, the check raises SelfCheckError.

    Raises: TemplateError, DataError, SelfCheckError, and EnvironmentFailed if the environment
      failed in every episode.
    """
    few = [*tasks[:2], *select_first_rows(tasks, 1)[2:]]
    tools, prompts = check_contexts(policy, tasks, x.environment)
    temperature = x.generation.temperature or 1.0
    short = min(x.generation.max_new_tokens, 32)
    rollouts = collect(
        policy,
        few,
        engine=x.generation.engine,
        environment=x.environment,
        group_size=2,
        seed=x.seed,
        **x.generation._replace(temperature=temperature, max_new_tokens=short).params,
    )
    if not any(rollout.steps for rollout in rollouts):
        raise DataError(
            count_failures(rollouts)
            or f"row {few[0].id}: its episode ended before the policy was asked anything"
        )
    device = next(policy.model.parameters()).device
    batch = assemble(rollouts, pad_token_id=policy.pad_token_id, device=device)
    mask = batch.response_mask
    sampled = sum(r.response_length for r in rollouts)
    if int(mask.sum()) != sampled:
        raise SelfCheckError(f"the loss mask has {int(mask.sum())} tokens, {sampled} were sampled")
    few_rows = mask.any(1).nonzero()[:FORWARD_ROWS, 0]
    ids = batch.ids[few_rows]
    marks = mask[few_rows]
    with torch.no_grad():
        packed = pack(batch.ids, mask)
        logprobs = forward_logprobs(policy.model, packed, temperature=temperature).logprobs
        own = compute_own_log_probs(policy.model, ids, marks, temperature)
        half = torch.is_autocast_enabled(device.type) or any(
            p.dtype == torch.bfloat16 for p in policy.model.parameters()
        )
        rounding = measure_rounding(policy.model, ids, marks, own, temperature) if half else None
    warnings = _compare(
        logprobs[few_rows][marks] - own,
        rounding,
        "the trainer and the model's own forward",
        f"the trainer would learn from other probabilities than {type(policy.model).__name__} has."
        " Does its forward change the last hidden states or the logits in a way that its class"
        " does not show, or does it use dropout?",
    )
    warnings += _compare(
        (logprobs - batch.logprobs_sampler)[mask],
        rounding,
        "sampler and trainer",
        "training would be wrong. Does the engine sample at generation.temperature and from the"
        " trainer's weights?",
    )
    return Agreement(warnings, not half, tools, prompts, rounding and rounding.bound)


def compute_own_log_probs(model: Any, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Compute log-probs [M] of the tokens marked by `mask` with the model's own forward. Each row
    has at least one marked token. The model reads each row alone, without padding.

    If the model allows it, logits are computed only from the row's first marked token on.
    """
    options = inspect.signature(base_model(model).forward).parameters
    parts = []
    for row, marks in zip(ids, mask, strict=True):
        positions = marks.nonzero()[:, 0]
        last = int(positions[-1])
        kept = int(positions[-1] - positions[0]) + 1
        few = {"logits_to_keep": kept} if "logits_to_keep" in options else {}
        logits = model(input_ids=row[None, :last], use_cache=False, **few).logits[0, -kept:]
        rows = logits[positions - positions[0]]
        parts.append(token_log_probs(rows, row[positions], temperature=temperature))
    return torch.cat(parts)


def compute_log_probs_by_token(
    model: Any, ids: Tensor, mask: Tensor, temperature: float
) -> Tensor | None:
    """Compute log-probs [M] of the tokens marked by `mask` with the model's own forward and its own
    cache. Each row has at least one marked token. The model reads all tokens before the row's first
    marked token in one pass, and the rest of the row token by token.

    Returns: the log-probs, or None if the forward does not take or return `past_key_values`.
    """
    causal = base_model(model)
    options = inspect.signature(causal.forward).parameters
    if "past_key_values" not in options:
        return None
    settings = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in options else {})
    parts = []
    with use_sampling_mode(causal):  # with checkpointed activations, training mode gives no cache
        for row, marks in zip(ids, mask, strict=True):
            positions = marks.nonzero()[:, 0].tolist()
            out = model(input_ids=row[None, : positions[0]], **settings)
            logits = [out.logits[0, -1]]
            for at in range(positions[0], positions[-1]):
                if getattr(out, "past_key_values", None) is None:
                    return None
                token = row[None, at : at + 1]
                out = model(input_ids=token, past_key_values=out.past_key_values, **settings)
                logits.append(out.logits[0, -1])
            rows = torch.stack([logits[at - positions[0]] for at in positions])
            parts.append(token_log_probs(rows, row[positions], temperature=temperature))
    return torch.cat(parts)


class Rounding(NamedTuple):
    """Hold the effect of half precision on a model's log-probs.

    The model reads the same tokens on two paths: the whole sequence at once, or token by token.
    `own` is the mean |Δ log-prob| between the two paths, in nats. `tokens` is the number of
    measured tokens, and 0 for a model without a cache.
    """

    own: float
    tokens: int

    @property
    def bound(self) -> float:
        """Return the threshold for the mean |Δ log-prob|. A larger mean gives a warning.

        The threshold is MARGIN times the larger of two numbers: the attribute `own`, and ROUNDOFF.
        If `own` was measured on fewer than FEW tokens, the second number is TYPICAL instead.
        """
        return MARGIN * max(self.own, TYPICAL if self.tokens < FEW else ROUNDOFF)

    def __str__(self) -> str:
        if not self.tokens:
            return "the model's forward takes no cache, so its rounding could not be measured"
        return (
            "the model's own two paths, the whole sequence and token by token, differ by"
            f" {self.own:.2g} on {self.tokens} tokens"
        )


def measure_rounding(
    model: Any, ids: Tensor, mask: Tensor, own: Tensor, temperature: float
) -> Rounding:
    """Measure how much a model's log-probs differ between two paths: reading a whole row at once,
    and reading it token by token. The difference is measured on the marked tokens of some rows, up
    to FORWARD_TOKENS positions in each row.

    Args:
      own: [M], the result of `compute_own_log_probs` for the same rows and mask.
    """
    first = mask.int().argmax(1, keepdim=True)
    few = mask & (torch.arange(mask.shape[1], device=mask.device) < first + FORWARD_TOKENS)
    by_token = compute_log_probs_by_token(model, ids, few, temperature)
    if by_token is None:
        return Rounding(0.0, 0)
    return Rounding(float((own[few[mask]] - by_token).abs().mean()), len(by_token))


def _compare(gap: Tensor, rounding: Rounding | None, who: str, why: str) -> list[str]:
    """Compare two computations of the same log-probs, and return warnings. Raise SelfCheckError if
    they differ too much.

    Args:
      gap: the differences of the log-probs, one per token.
      rounding: the model's rounding in half precision; None in float32.
      who: names the two computations in the message.
      why: the consequence of a large difference, for the message.
    """
    mean = float(gap.abs().mean())
    most = float(gap.abs().max())
    if rounding is None:
        if most < FP32_TOLERANCE:
            return []
        raise SelfCheckError(
            f"the log-probs of {who} differ by up to {most:.2e} nats, more than {FP32_TOLERANCE}:"
            f" {why}"
        )
    if not mean <= BF16_LIMIT:
        raise SelfCheckError(
            f"the log-probs of {who} differ by {mean:.3f} nats a token on average, more than"
            f" {BF16_LIMIT}: {why}"
        )
    if mean <= rounding.bound:
        return []
    return [
        f"the log-probs of {who} differ by {mean:.3f} nats a token on average, more than the"
        f" {rounding.bound:.2g} expected from rounding; {rounding}"
    ]
