"""Check the assumptions of an experiment's parts against the declarations of the other parts. The
decorators `assumes`, `gives` and `keeps` of `rlkit.types` make the declarations.

There is no table of forbidden pairs. Each term of a reward guarantees words, for example "binary".
The words are followed from the terms to the advantage, through weights, aggregator, normalisation,
overlong rule and a KL in the baseline. Each of these may lose words. A part's assumptions are
compared with the words still guaranteed for the rewards at this part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.errors import name_function
from rlkit.types import ASSUMPTIONS, GUARANTEES, Environment, Task, bound, declarations, plain

if TYPE_CHECKING:  # torch is imported only with the parts that need it
    from rlkit.training.experiment import Experiment

# assumption → the guarantee it needs
OF_REWARDS = {f"{word}_rewards": word for word in GUARANTEES}
NEEDED = {
    "binary": (
        "choose a reward of 0 and 1 (numeric, exact_match, contains, format, code_exec,"
        " math_verify)"
    ),
    "non_negative": "choose a reward that is never negative",
    "raw": "choose a reward that looks at one rollout alone",
}


class Words(NamedTuple):
    """Hold the guarantees missing for the rewards at one place. `lost`: word → why the guarantee
    does not hold. `unsaid`: word → the part without a declaration. For this word it is unknown
    whether the guarantee holds."""

    lost: Mapping[str, str] = {}
    unsaid: Mapping[str, str] = {}

    def lose(self, words: Sequence[str], why: str) -> Words:
        """Return a copy with these words lost too. An already lost word keeps its reason."""
        return self._replace(lost=dict.fromkeys(words, why) | dict(self.lost))

    def pass_through(self, part: Any, path: str, why: str) -> Words:
        """Return the guarantees of the rewards after a part has changed them. Only the words that
        the part declares to keep remain."""
        kept = declarations(part, "keeps")
        if kept is None:
            return self._replace(unsaid=dict.fromkeys(GUARANTEES, path) | dict(self.unsaid))
        return self.lose([word for word in GUARANTEES if word not in kept], why)


def assumption_problems(x: Experiment, tasks: Sequence[Task] = ()) -> list[str]:
    """List the assumptions broken in the experiment, as sentences with a remedy.

    Args:
      tasks: rows of the run, once they are loaded. The rows name their rewards and environments if
        the config chooses these by row.
    """
    problems = []
    for path, part, words in _list_assuming_parts(x, tasks):
        for assumed in sorted(declarations(part, "assumes") or ()):
            word = OF_REWARDS.get(assumed, "")
            if word in words.lost:
                problems.append(
                    f"{path} ({name_function(part)}) assumes {ASSUMPTIONS[assumed]}, but"
                    f" {words.lost[word]}"
                )
    return problems + _reply_budgets(x)


def assumption_warnings(x: Experiment) -> list[str]:
    """List assumptions neither broken nor guaranteed, because a part has no declaration. Also list
    limits on a whole episode if a single reply may exceed the limit."""
    out = []
    for path, part, words in _list_assuming_parts(x, ()):
        for assumed in sorted(declarations(part, "assumes") or ()):
            word = OF_REWARDS.get(assumed, "")
            if word in words.unsaid and word not in words.lost:
                silent = words.unsaid[word]
                out.append(
                    f"{path} ({name_function(part)}) assumes {ASSUMPTIONS[assumed]}, and"
                    f" {silent} does not say what it gives; where it is so, mark the function"
                    f" @rlkit.types.{'gives' if 'terms' in silent else 'keeps'}('{word}')"
                )
    return out + _episode_budgets(x)


def _list_assuming_parts(x: Experiment, tasks: Sequence[Task]) -> list[tuple[str, Any, Words]]:
    """List (path, part, guarantees of the part's rewards) for each part of an algorithm that reads
    rewards, in the order of the parts."""
    a = x.algorithm
    kl = x.kl
    given = _find_reward_words(x, tasks)
    why = (
        f"algorithm.overlong ({name_function(a.overlong)}) changes them by length; choose"
        " algorithm/overlong=none"
    )
    shaped = given.pass_through(a.overlong, "algorithm.overlong", why)
    if kl.in_reward and kl.in_baseline:
        shaped = shaped.lose(
            ["binary", "non_negative"], "kl.in_baseline takes the KL off them; set it to false"
        )
    raw = _find_reward_words(x._replace(reward=x.reward._replace(normalize=False)), tasks)
    seen = {"group_filter": raw, "overlong": given, "advantage": shaped, "normalization": shaped}
    return [(f"algorithm.{slot}", a.parts[slot], words) for slot, words in seen.items()]


def _find_reward_words(x: Experiment, tasks: Sequence[Task]) -> Words:
    """Return the guarantees of the rewards used in training, after terms, weights, aggregator and
    normalisation."""
    words = Words()
    counted = {name: term for name, term in x.reward.terms.items() if term.weight != 0}
    for name, term in counted.items():
        path = f"reward.terms.{name}"
        for fn in _candidates(term.fn, tasks):
            given = declarations(fn, "gives")
            if given is None:
                words = words._replace(unsaid=dict.fromkeys(GUARANTEES, path) | dict(words.unsaid))
                continue
            for word in GUARANTEES:
                if word not in given:
                    words = words.lose(
                        [word],
                        f"{path} ({name_function(fn)}) does not guarantee it; {NEEDED[word]}",
                    )
        if term.weight != 1:
            scaled = (
                f"{path}.weight={term.weight} scales them; set it to 1, or to 0, which only logs"
                " the term"
            )
            positive = isinstance(term.weight, int | float) and term.weight > 0
            words = words.lose(["binary"] if positive else ["binary", "non_negative"], scaled)
        if term.per_step:
            words = words.lose(
                ["binary"], f"{path} gives a score to every step; {NEEDED['binary']}"
            )
    aggregator = x.reward.aggregator
    # with a single component, every aggregator returns that component
    if len(counted) > 1 or not declarations(aggregator, "keeps"):
        why = (
            f"reward.aggregator ({name_function(aggregator)}) joins {', '.join(counted)}; give"
            " one of them a weight, and the others 0"
        )
        words = words.pass_through(aggregator, "reward.aggregator", why)
    if x.reward.normalize:
        words = words.lose(
            list(GUARANTEES), "reward.normalize shifts and scales them; set it to false"
        )
    return words


def _candidates(fn: Any, tasks: Sequence[Task]) -> list[Any]:
    """List the functions that score rollouts for a term. This is `fn` itself, or for `by_task` the
    functions named in the rows."""
    from rlkit.rewards import by_task, list_named_rewards

    if plain(fn) is not by_task:
        return [fn]
    known = list_named_rewards(fn)
    return [known[name] for name in dict.fromkeys(task.reward for task in tasks) if name in known]


def _reply_budgets(x: Experiment) -> list[str]:
    """Report limits on the length of one reply that no reply can reach, because
    generation.max_new_tokens is smaller."""
    longest = x.generation.max_new_tokens
    out = []
    for name, part in x.algorithm.parts.items():
        numbers = bound(part)
        begins = numbers.get("limit", 0) * (1 - numbers.get("buffer", 0))
        if "reply_budget" in (declarations(part, "assumes") or ()) and begins >= longest:
            out.append(
                f"algorithm.{name}.limit={numbers['limit']}: is a limit of one reply, and none is"
                f" longer than generation.max_new_tokens={longest}, so it never sets in; lower it,"
                " or for whole episodes add reward=soft_length"
            )
    return out


def _episode_budgets(x: Experiment) -> list[str]:
    """Report limits on the length of an episode with several replies, if a single reply may already
    exceed the limit."""
    # environments chosen by row have different numbers of replies, so nothing is reported
    turns = x.environment.max_steps if isinstance(x.environment, Environment) else 1
    out = []
    for name, term in x.reward.terms.items():
        limit = bound(term.fn).get("limit")
        if (
            turns == 1
            or limit is None
            or "episode_budget" not in (declarations(term.fn, "assumes") or ())
        ):
            continue
        if limit < x.generation.max_new_tokens:
            out.append(
                f"reward.terms.{name}.fn.limit={limit}: is a limit of a whole episode, which has up"
                f" to {turns} replies of up to"
                f" generation.max_new_tokens={x.generation.max_new_tokens}; raise it, or choose"
                " algorithm/overlong=penalty, of a reply"
            )
    return out
