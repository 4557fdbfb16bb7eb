"""Score rollouts with verifiable rewards. A reward function takes a rollout and returns a score, or
None if the rollout cannot be scored.

Each file imports only from files above it in this list.

declarations.py  declarations of a function: batched, no_gold, reads_truth and others
verdicts.py      the input of a reward function, and the values it may return
aggregators.py   from named components to one reward
terms.py         Term and Reward, the records of a config
calls.py         calling functions: plain, async, batched, with limits and threads
checks.py        whether a returned value is a score, and its status
_score.py        scoring: call terms, check values, aggregate, return rollouts with rewards
_normalise.py    rewards on one scale over a run
_numeric.py      the number given by a reply as its answer
text.py          replies compared as text
behaviour.py     length, repetition, tools, turns, the environment's own payments
fences.py        code blocks of a reply
_code_exec.py    the tests passed by a program
_by_task.py      the reward named by each row
"""

from rlkit.rewards._by_task import by_task, list_named_rewards
from rlkit.rewards._code_exec import Judgement, code_exec, extract_code, judgements, split_tests
from rlkit.rewards._normalise import Moments, normalise, update_moments
from rlkit.rewards._numeric import extract_answer, numeric, parse_number
from rlkit.rewards._score import score, score_spread
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
