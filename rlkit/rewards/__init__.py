"""Score rollouts with verifiable rewards. A reward function takes a rollout and returns a score, or
None if the rollout cannot be scored.

Each file imports only from files above it in this list.

declarations.py  declare properties of a function: batched, no_gold, reads_truth and others
verdicts.py      define the answer in a rollout, and the values that a reward function may return
aggregators.py   make one reward from named components
terms.py         define Term and Reward, the records of a config
calls.py         call functions: plain, async or batched, with time limits and in threads
checks.py        check whether a returned value is a score, and find its status
_score.py        score: call terms, check values, aggregate, return rollouts with rewards
_moments.py      keep the running mean and deviation of all rewards
_numeric.py      compare the number that a reply gives as its answer
text.py          compare replies as text
behaviour.py     score length, repetition, tools, turns, and the environment's rewards
fences.py        find the code blocks of a reply
_code_exec.py    score a program by its tests
_by_task.py      score each row with its own reward
"""

from rlkit.rewards._by_task import by_task, list_named_rewards
from rlkit.rewards._code_exec import Judgement, code_exec, extract_code, judgements, split_tests
from rlkit.rewards._moments import Moments, update_moments
from rlkit.rewards._numeric import extract_answer, numeric, parse_number
from rlkit.rewards._score import score
from rlkit.rewards.aggregators import (
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
from rlkit.rewards.checks import RewardError
from rlkit.rewards.declarations import (
    batched,
    no_gold,
    read_declarations,
    reads_fields,
    reads_truth,
    reads_truths,
)
from rlkit.rewards.terms import Reward, Term
from rlkit.rewards.text import contains, exact_match, format_match
from rlkit.rewards.verdicts import Verdict, final_answer
