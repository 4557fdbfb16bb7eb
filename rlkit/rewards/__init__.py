"""Verifiable rewards: functions of a rollout that give a score, or None where it cannot be scored."""

from rlkit.rewards.aggregators import weighted_sum
from rlkit.rewards.answers import final_answer
from rlkit.rewards.by_task import by_task
from rlkit.rewards.code_exec import Judgement, code_exec, extract_code, judgements
from rlkit.rewards.numeric import extract_answer, numeric, parse_number
from rlkit.rewards.score import Reward, RewardError, Term, batched, score
from rlkit.rewards.text import contains, exact_match, format_match

__all__ = [
    "Judgement",
    "Reward",
    "RewardError",
    "Term",
    "batched",
    "by_task",
    "code_exec",
    "contains",
    "exact_match",
    "extract_answer",
    "extract_code",
    "final_answer",
    "format_match",
    "judgements",
    "numeric",
    "parse_number",
    "score",
    "weighted_sum",
]
