"""Describe a reward as a record: its terms by name, the aggregator of their values, and how often
they may fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlkit.errors import ConfigError, require_arguments
from rlkit.rewards.aggregators import weighted_sum
from rlkit.rewards.declarations import read_declarations
from rlkit.types import AggregatorFn, Rollout, Task, safe


@safe("fn")
class Term(NamedTuple):
    """Describe one component of a reward: a plain or async function of one rollout, and the rules
    for calling the function.

    fn        returns the score, or a pair (score, metrics). metrics are numbers by name. Their
              means are logged as reward/TERM/NAME in the row of the RL step
    weight    factor of the score in the aggregate. A term of weight 0 is scored and logged, but it
              is not part of the reward
    batched   fn takes the list of all rollouts and returns a list of scores
    per_step  fn returns a list with one number or None for each step. weight * number is added to
              `Step.reward`, on top of the environment's payment. The aggregate of the other terms
              is given at the end of the episode. The logged component is the sum of the numbers
    timeout   seconds for a call; None: no limit. A batched term has one call for all rollouts.
              After the timeout, an async function is cancelled. A plain function runs in a thread,
              and a thread cannot be killed. Therefore the call is given up, but its thread goes on
              in the background. Run code that may hang in a child process, as math_verify does
    threads   number of rollouts that a plain function scores at the same time, each in its own
              thread, > 0. Use more than 1 for a function that waits, for example for the network.
              With several threads, its random numbers depend on timing
    """

    weight: float
    fn: Callable[..., Any]
    batched: bool = False
    per_step: bool = False
    timeout: float | None = None
    threads: int = 1

    @property
    def takes_all(self) -> bool:
        """Say whether the function takes the list of all rollouts."""
        return self.batched or read_declarations(self.fn).batched


@safe("name", "terms")
class Reward(NamedTuple):
    """Describe a reward: named terms in order, and the aggregator that makes one number of their
    scores.

    aggregator      function from (scores, weights) to a number, or a function of the whole batch
                    (rlkit.rewards.aggregators). The aggregator may also return (number, metrics).
                    metrics are numbers by name. Their means over the scored rollouts are logged as
                    aggregator/NAME
    max_error_rate  share of rollouts, 0 … 1, on which a term may raise, hang or return no reward. A
                    rollout with such a failure cannot be scored (None). `reward/NAME/error_frac`
                    and `timeout_frac` count these rollouts. Above this share, scoring stops with an
                    error
    normalize       whether to train on (reward - mean) / std, with mean and std over all episodes
                    of the run so far. Metrics show the raw rewards
    """

    name: str
    terms: Mapping[str, Term]
    aggregator: AggregatorFn = weighted_sum
    max_error_rate: float = 0.0
    normalize: bool = False


def require_terms(reward: Reward) -> None:
    """Raise ConfigError if every weight is 0, a limit is out of range, or a function cannot be
    called with one argument."""
    if not any(term.weight for term in reward.terms.values()):
        raise ConfigError(
            f"reward {reward.name!r} has no term of non-zero weight; set one of"
            " reward.terms.NAME.weight"
        )
    if not 0 <= reward.max_error_rate <= 1:
        raise ConfigError(
            f"reward {reward.name!r}: max_error_rate is a share of the rollouts, 0 … 1, not"
            f" {reward.max_error_rate}"
        )
    for name, term in reward.terms.items():
        if term.threads < 1:
            raise ConfigError(
                f"reward term {name!r}: threads must be at least 1, not {term.threads}"
            )
        if term.timeout is not None and not term.timeout > 0:
            raise ConfigError(
                f"reward term {name!r}: timeout must be > 0 seconds, or null for no limit, not"
                f" {term.timeout}"
            )
        given = [] if term.takes_all else Rollout(Task("", ()), ())
        require_arguments(term.fn, f"reward term {name!r}", given)
