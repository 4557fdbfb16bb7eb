"""Describe known pathologies of a run in plain words, and name the config keys whose values help.

Each check reads a step's row. It returns a sentence if the row shows the pathology, and None
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]
# metric of an evaluation → the key of its confidence interval
INTERVALS = {"accuracy": "interval", "reward": "reward_interval"}


# The largest accepted mean difference between sampler and trainer in float32, in nats per token.
# The check before the first step has the same limit.
MISMATCH = 0.001
CUT = 0.5  # share of truncated episodes
PROOF = 6  # digits that prove a version (rlkit.training.update.claims)
LEAST_BAD = "least_bad"  # key of the smallest group/frac_all_bad of the run so far


def with_least_bad(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the rows of a run in their order, and add one entry to each row. The key of this entry
    is LEAST_BAD. Its value is the smallest group/frac_all_bad of all rows up to this row."""
    least = 1.0
    for row in rows:
        bad = row.get("group/frac_all_bad")
        least = least if bad is None else min(least, bad)  # ignores nan
        yield {**row, LEAST_BAD: least}


def broken_policy(row: Row) -> str | None:
    """Report a broken policy: most prompts were solved in an earlier step, and hardly any prompt is
    solved now. The problems are not too hard, because the policy has solved them before."""
    if not (row.get("group/frac_all_bad", 0) >= 0.9 and row.get(LEAST_BAD, 1) < 0.5):
        return None
    return (
        f"{1 - row[LEAST_BAD]:.0%} of the prompts were solved by some sample, and now"
        f" {1 - row['group/frac_all_bad']:.0%} are: the updates broke the policy; lower"
        " optimizer.lr"
    )


def all_rewards_equal(row: Row) -> str | None:
    """Report that nothing is learned from rewards, because all rewards within each group are equal
    and nothing else gives an advantage."""
    # a critic or other groups of the batch give advantages; a group of one always has equal rewards
    compared = row["reward/std"] > 0 and row["adv/abs_mean"] > 0
    # demonstrations are not sampled, and the policy learns all of them
    demonstrated = "reward/demonstration/mean" in row
    followed = any(name.startswith("streams/") for name in row)  # a teacher, or given tokens
    if row["group/frac_zero_std"] < 1 or compared or demonstrated or followed or broken_policy(row):
        return None
    bad = row["group/frac_all_bad"]
    if bad >= 0.9 and row["len/truncated_frac"] > CUT:
        remedy = "first let the replies end"  # most_truncated says how
    elif bad <= 0.1:
        remedy = "these prompts are solved, so end the run, or choose harder problems (task)"
    elif bad >= 0.9:
        remedy = (
            "choose easier problems (task), put worked examples into the prompts, or warm the model"
            " up (experiment=sft)"
        )
    else:
        remedy = (
            "raise batch.group_size, or choose problems of medium difficulty (task); these are"
            " solved always or never. If rewards differed before, the policy settled on one reply"
            " to each prompt: begin again with a lower optimizer.lr"
        )
    return (
        f"all rewards of every prompt's group are equal (mean {row['reward/mean']:.2f}): there is"
        f" nothing to learn from; {remedy}"
    )


REMEDIES = {  # the most frequent reason for truncation → the change of the config that helps
    "length": "raise generation.max_new_tokens, or shorten thinking (model.enable_thinking=false,"
    " generation.max_thinking_tokens)",
    "context": (
        "lower generation.max_new_tokens or the environment's max_turns, or set its"
        " overflow=drop_oldest"
    ),
    "steps": (
        "raise the environment's max_turns (environment.max_turns; with environment=by_task"
        " environment.environments.NAME.max_turns)"
    ),
    "deadline": "raise environment.deadline",
    "environment": "raise the environment's own limit",
    "error": "look at the error in samples/",
}
OF_PROGRAMS = {  # for environment=program: the remedies that differ
    "context": "lower generation.max_new_tokens or environment.max_turns",
    "deadline": "raise environment.time_limit",
}


def most_truncated(row: Row) -> str | None:
    """Report that more than half of the episodes were truncated."""
    if not row["len/truncated_frac"] > CUT or broken_policy(row):
        return None
    why = max(REMEDIES, key=lambda why: row.get(f"stop_reason/{why}", 0))
    remedies = REMEDIES | (OF_PROGRAMS if "program/rows" in row else {})
    return (
        f"{row['len/truncated_frac']:.0%} of the episodes were truncated, most often by {why}:"
        f" {remedies[why]}"
    )


def length_inflation(row: Row) -> str | None:
    """Report inflated lengths in two cases. In the first case, some replies repeat the same
    text over and over. In the second case, a policy that learns from a teacher has many
    truncated replies. Within repeated text, teacher and policy predict the same next token, so the
    teacher does not teach the policy to stop."""
    looping = row["len/loop_frac"]
    cut = row["len/truncated_frac"] if "streams/teacher" in row else 0
    if not (looping > 0.02 or cut > 0.15):
        return None
    remedy = (
        "add a demonstration (algorithm.streams.imitation), stay close to the start (kl=k3), or"
        " lower algorithm.streams.teacher.coef"
    )
    what = (
        f"{looping:.0%} of the episodes repeat themselves"
        if looping > 0.02
        else f"{cut:.0%} of the replies trained with a teacher are cut"
    )
    return f"{what}: lengths inflate; {remedy}"


def parse_failures(row: Row) -> str | None:
    """Report that more than a fifth of the episodes have an unreadable tool call."""
    share = row["parse_fail_frac"]
    remedy = (
        "look at samples/, and choose the format that the model writes with environment/parse_calls"
        " (hermes, xml)"
    )
    return (
        f"{share:.0%} of the episodes have a tool call that cannot be read: {remedy}"
        if share > 0.2
        else None
    )


def reward_failures(row: Row) -> str | None:
    """Report a reward term that raised an error, hung or returned no reward. The run continues,
    because the share of these failures is at most reward.max_error_rate."""
    rates = {
        key.removesuffix("/error_frac"): row[key]
        + row[f"{key.removesuffix('error_frac')}timeout_frac"]
        for key in row
        if key.startswith("reward/") and key.endswith("/error_frac")
    }
    if not any(rates.values()):
        return None
    worst = max(rates, key=rates.__getitem__)
    return (
        f"the reward term {worst.removeprefix('reward/')} failed on {rates[worst]:.1%} of the"
        f" episodes; they are not trained on, and {worst}/error_frac and timeout_frac count them"
    )


def ratio_off(row: Row) -> str | None:
    """Report that the ratio of the first minibatch is not 1, although this minibatch is
    on-policy."""
    ratio = row["ratio/first_mean"]  # nan reports nothing
    return (
        f"the ratio of the first minibatch is {ratio:.3f}, not 1: the log-probs in the update"
        " differ from those of the pass before it"
        if abs(ratio - 1) > 0.01
        else None
    )


def sampler_off(row: Row) -> str | None:
    """Report that sampler and trainer compute different log-probs for the same tokens. In half
    precision, the accepted difference is derived from the rounding measured before the first step
    (`Agreement.bound`)."""
    gap = row["mismatch/logp_abs_mean"]
    bound = row.get("mismatch/logp_abs_bound", MISMATCH)
    return (
        f"sampler and trainer log-probs differ by {gap:.3f} nats a token on average, more than"
        f" {bound:.2g}"
        if gap > bound
        else None
    )


def version_wrong(row: Row) -> str | None:
    """Report that the engine samples with another version of the weights than it reports."""
    digits = row.get("mismatch/version_wrong", 0.0)
    if not digits >= PROOF:
        return None
    return (
        "the engine samples with another version of the weights than it reports (an honest engine"
        f" looks like this once in 10^{digits:.0f} times): it missed an update of the weights;"
        " restart the engine, and continue with resume=FOLDER"
    )


def version_unknown(row: Row) -> str | None:
    """Report that it is not yet known whether the engine samples with the version of the weights
    that it reports. Consecutive versions differ by less than the rounding of the engine."""
    digits = row.get("mismatch/version_right", PROOF)
    if not digits < PROOF or version_wrong(row):
        return None
    return (
        "so far the run cannot tell whether the engine samples with the version that it reports:"
        " two versions differ by less than its rounding"
    )


def environment_failures(row: Row) -> str | None:
    """Report episodes with a failed environment. These episodes have no score, so nothing is
    learned from them."""
    share = row["stop_reason/error"]
    return (
        f"the environment failed in {share:.0%} of the episodes; they are not scored"
        if share
        else None
    )


def dropped_thinking(row: Row) -> str | None:
    """Report that a program removes the thinking of earlier replies from its prompts. Each removal
    begins a new row of the batch. The pathology is reported if these rows hold more than a tenth of
    the prompt tokens."""
    share = row.get("program/thinking_tokens", 0.0) / (row.get("program/prompt_tokens") or 1.0)
    return (
        "the program drops the thinking of replies, and each time a new row begins;"
        f" {share:.0%} of the prompt tokens are in these rows."
        " environment.dropped_thinking=continue goes on with the same row instead"
        if share > 0.1
        else None
    )


def no_answers(row: Row) -> str | None:
    """Report that all programs of a step left their final content empty, although a reward reads
    it."""
    reads = any(name.endswith("/ok_frac") and name != "reward/environment/ok_frac" for name in row)
    return (
        "every final content is empty, and the reward reads it: set environment.answer to the place"
        " of the program's answer (tool:NAME, stdout, file)"
        if "program/rows" in row and row["answer_found_frac"] == 0 and reads
        else None
    )


def no_gradient(row: Row) -> str | None:
    """Report updates that changed nothing, if equal rewards are not the reason."""
    known = all_rewards_equal(row) or broken_policy(row)
    if row["optim/grad_norm"] != 0 or not row["optim/updates"] or known:
        return None
    taught = "streams/teacher" in row and row["streams/teacher"] == 0
    why = (
        "the teacher equals the policy; choose another one (teacher), or keep a reward"
        " (algorithm.streams.reward)"
        if taught
        else "look at loss/total, adv/abs_mean and the weights of your own parts"
    )
    return f"the gradient is exactly 0, so no weight moves: {why}"


def update_skipped(row: Row) -> str | None:
    """Report updates skipped because loss or gradient was not finite."""
    count = row["optim/skipped_nonfinite"]
    return f"{count} update(s) skipped: loss or gradient not finite" if count else None


def waits_for_cores(row: Row) -> str | None:
    """Report that other processes take the cores of this machine. The update took at least twice as
    long as the processor worked on it, and at least one second longer.

    Only the update can show this, because an update computes in this process and waits for nothing
    else. A rollout may wait for tools or a server.
    """
    took = row["perf/update_s"]
    worked = row["perf/update_processor_s"]
    if not (took >= 2 * worked and took - worked >= 1):  # also if a time is nan, not measured
        return None
    return (
        f"the update took {took:.1f} s, and the processor worked only {worked:.1f} s of them: other"
        " processes take this machine's cores, so the times of this run say little"
    )


CHECKS: tuple[Callable[[Row], str | None], ...] = (
    broken_policy,
    all_rewards_equal,
    most_truncated,
    length_inflation,
    parse_failures,
    reward_failures,
    environment_failures,
    dropped_thinking,
    no_answers,
    ratio_off,
    sampler_off,
    version_wrong,
    version_unknown,
    no_gradient,
    update_skipped,
    waits_for_cores,
)
