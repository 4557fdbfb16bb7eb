"""Verifiable rewards: functions of a rollout that give a score, or None where it cannot be
scored."""

from rlkit.rewards._by_task import by_task, named_rewards
from rlkit.rewards._code_exec import Judgement, code_exec, extract_code, judgements, tests_of
from rlkit.rewards._normalise import Moments, normalise, update_moments
from rlkit.rewards._numeric import extract_answer, numeric, parse_number
from rlkit.rewards._score import (
    Reward,
    RewardError,
    Term,
    Verdict,
    final_answer,
    has_gold,
    no_gold,
    reads_truth,
    reads_truths,
    score,
    score_spread,
)
from rlkit.rewards.aggregators import (
    batched,
    group_normalised,
    largest,
    mean,
    product,
    smallest,
    weighted_sum,
)
from rlkit.rewards.behaviour import (
    environment,
    few_turns,
    length,
    repetition,
    soft_length,
    tool_usage,
)
from rlkit.rewards.lists import listed, paid, priced
from rlkit.rewards.text import contains, exact_match, format_match
from rlkit.types import RewardFn

# mypy fails where one of these is no reward of a rollout; those that are marked `batched` take a
# list.
_CHECKED: tuple[RewardFn, ...] = (
    contains,
    environment,
    exact_match,
    few_turns,
    format_match,
    length,
    numeric,
    repetition,
    soft_length,
)
_CHECKED_TOO: tuple[RewardFn, ...] = (tool_usage,)
