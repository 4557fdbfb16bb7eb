"""Find causes in the settings: learning rate, KL, entropy, critic, groups, temperature, lengths.

A check takes the evidence and returns a finding or None. Limits without a cited paper were tuned on
half of the planted faults in experiments/why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

from rlkit.extras.why.evidence import (
    MIXED,
    NONE,
    Evidence,
    Finding,
    share_of_copies,
    spread_within,
)

CUT = 0.3  # share of truncated episodes
HARD = 0.9  # share of groups without a good reply
# The same share in the first step alone. Of eight groups with a true share of 0.9, six or more have
# no good reply with probability 0.96, and all eight with 0.43.
HARD_FIRST = 0.75
EASY = 0.5  # share of groups of good replies alone, in the first third
NEAR_BEST = 0.85  # mean reward of the first third, as a share of the best one read
EQUAL = 0.4  # share of groups with equal rewards; from here on a small group is to blame
SMALL = 4  # rollouts of a small group
COPIES = 0.6  # share of replies equal to another of their group
COLD = 0.7  # copies are the fault of a lower temperature
HOT = 1.25  # above this temperature replies are noise
STILL = 1e-4  # KL to the start, in nats a token; a policy below it has not moved (docs/choosing.md)
FAR = 0.05  # KL of a step, in nats a token; above it the step is too large (docs/choosing.md)
LOST = 0.5  # share of the first reward that is left after a step that was too large
# Fewest steps that say something of the rate: a row has the distance before its update.
LEAST = 4
TIMES = 10  # factor between the rate and the model's own
TIGHT = 2.0  # gain allowed by the KL, in standard deviations of the reward within a group
# advantages without need for a second rollout of a prompt
ALONE = ("batch_mean", "raw", "remax", "reward_to_go", "gae", "turn_gae", "adaptive_gae")
LOUD = 0.1  # entropy coefficient
EXPLAINED = 0.05  # share of the returns' variance explained by a useful critic
# A young critic explains nothing yet, but it learns the mean of the returns first. A useless one is
# no longer young after so many steps, or still as far from the mean as in the first step: by more
# than this share of that distance, and of the rewards' deviation.
YOUNG = 50
HEAD_RATE = 1e-3  # of conf/algorithm/critic/head.yaml
REST = 0.5
APART = 0.25


def cut_replies(e: Evidence) -> Finding | None:
    """Report if many episodes are cut off before they answer."""
    share = e.lasting("len/truncated_frac")
    if not share > CUT:
        return None
    reasons = ("length", "context", "steps", "deadline", "environment", "error")
    known = {name: e.mean(f"stop_reason/{name}") for name in reasons}
    why = max(known, key=lambda name: (known[name] > 0, known[name]))  # nan: none
    turns = find_turns(e)
    limit = e.number("generation.max_new_tokens")
    if why == "length" and limit == limit:
        return Finding(
            "cut",
            "Replies are cut before they answer.",
            f"{share:.0%} of the episodes were cut at generation.max_new_tokens={limit:.0f}.",
            "Allow longer replies, here four times as long. If the model thinks before it answers,"
            " model.enable_thinking=false shortens its replies.",
            (f"generation.max_new_tokens={4 * limit:.0f}",),
        )
    seconds = e.number("environment.time_limit")
    key = "environment.deadline" if seconds != seconds else "environment.time_limit"
    more = " ".join(f"{name}={2 * value:g}" for name, value in turns.items())
    advice = {
        "steps": f"Allow more turns, for example twice as many{f' ({more})' if more else ''}.",
        "context": "Lower generation.max_new_tokens, or let the environment drop its oldest turns.",
        "deadline": f"Raise {key}, or make the tools faster.",
    }
    at = " ".join(f"{name}={value:g}" for name, value in turns.items())
    limits = {
        "length": "the length of a reply",
        "context": "the model's context",
        "steps": f"the limit of turns{f' ({at})' if at else ''}",
        "deadline": f"the time limit ({key}={seconds:g})",
        "environment": "the environment",
        "error": "an error",
    }
    if seconds != seconds:
        limits["deadline"] = f"the time limit ({key})"
    # not explaining hard problems: a game that is lost ends at its last turn too
    return Finding(
        "limit",
        "Episodes are cut before they end.",
        f"{share:.0%} of the episodes were cut, most of them by {limits[why]}.",
        advice.get(why, "Read samples/."),
    )


def find_turns(e: Evidence) -> dict[str, float]:
    """Find the environment's limits of turns: dotted key → value."""
    keys = [key for key in e.run.settings if key.startswith("environment.")]
    found = {key: e.number(key) for key in keys if key.endswith(".max_turns")}
    return {key: value for key, value in found.items() if value == value}


def hard_problems(e: Evidence) -> Finding | None:
    """Report if nearly no group has a good reply."""
    share = e.mean("group/frac_all_bad")
    if not (share >= HARD and begins_high(e, "group/frac_all_bad")) or e.progress.rose:
        return None
    size = e.number("batch.group_size")
    task = " ".join(own for own in e.given if own.partition("=")[0].split(".")[0] == "task")
    own = f"You set {task}: choose easier problems" if task else "Choose easier problems"
    if min(e.values("group/frac_all_bad"), default=0.0) == 1:
        # Not even one of many replies was right, so a few more in a group would not be either.
        return Finding(
            "hard",
            "No reply has earned anything.",
            f"In none of {e.steps} steps was a reply right, so there was nothing to compare.",
            "Read some replies (rlkit rollout): if they say the answer in another form, ask for the"
            f" form in the prompt, or choose another reward. {own}, put worked examples into the"
            " prompts, or warm the model up in a run with experiment=sft.",
        )
    return Finding(
        "hard",
        "The problems are too hard for this model.",
        f"In {share:.0%} of the groups no reply earned anything; the mean reward is"
        f" {e.mean('reward/mean'):.2f}.",
        f"{own}, or give partial credit with a second reward term. If neither is possible, warm the"
        " model up in a run with experiment=sft, or sample larger groups.",
        (f"batch.group_size={4 * size:.0f}",),
    )


def begins_high(e: Evidence, metric: str) -> bool:
    """Return whether a share of groups is high in the first step already, before any update."""
    return min(e.values(metric)[:1], default=1.0) >= HARD_FIRST


def easy_problems(e: Evidence) -> Finding | None:
    """Report if from the start most groups have only good replies, so that they teach nothing and
    nearly nothing is left to gain."""
    share = e.mean("group/frac_all_good", 0)
    best = max((r.total_reward or 0.0 for r in e.rollouts), default=math.inf)
    if not (share >= EASY and e.progress.first >= NEAR_BEST * best):
        return None
    return Finding(
        "easy",
        "The problems are too easy for this model.",
        f"Little is left to learn: the mean reward began at {e.progress.first:.2f}, and the best"
        f" reply of all earned {best:.2f}. In {share:.0%} of the first third's groups every reply"
        " was good, so they had nothing to compare.",
        "Choose harder problems, or replace groups with equal rewards by new ones.",
        MIXED,
    )


def cold_sampling(e: Evidence) -> Finding | None:
    """Report if a low temperature makes the replies of a group copies of each other."""
    temperature = e.number("generation.temperature")
    copies = share_of_copies(e.groups)
    if not (temperature < COLD and copies > COPIES):
        return None
    return Finding(
        "temperature",
        "The temperature is too low to find better replies.",
        f"At generation.temperature={temperature:g}, {copies:.0%} of the replies repeat another"
        f" reply of their group word for word. All rewards were equal in"
        f" {e.mean('group/frac_zero_std'):.0%} of the groups, which teach nothing.",
        "Sample at temperature 1: this is the model's own distribution.",
        ("generation.temperature=1",),
    )


def hot_sampling(e: Evidence) -> Finding | None:
    """Report if a high temperature turns the replies into noise."""
    temperature = e.number("generation.temperature")
    if not temperature > HOT or e.progress.rose:
        return None
    return Finding(
        "temperature",
        "The temperature is too high.",
        f"At generation.temperature={temperature:g} the policy's entropy is"
        f" {e.mean('policy/entropy'):.2f} nats a token, and the reward did not rise.",
        "Sample at temperature 1: this is the model's own distribution.",
        ("generation.temperature=1",),
    )


def compares_groups(e: Evidence) -> bool:
    """Return whether advantages compare the rollouts of a prompt with each other, not with the
    batch or a critic."""
    return str(e.setting("algorithm.advantage._target_", NONE)).rpartition(".")[2] not in ALONE


def small_groups(e: Evidence) -> Finding | None:
    """Report if groups are so small that most have equal rewards, although the problems are
    sometimes solved."""
    size = e.number("batch.group_size")
    equal = e.lasting("group/frac_zero_std")
    decided = max(e.mean("group/frac_all_bad"), e.mean("group/frac_all_good")) >= HARD
    few = size <= SMALL and equal >= EQUAL and not decided
    if not few or e.progress.rose or not compares_groups(e):
        return None
    larger = max(8, 4 * size)
    return Finding(
        "groups",
        "The groups are too small.",
        f"With {size:.0f} samples a prompt, all rewards were equal in {equal:.0%} of the groups,"
        " which teach nothing.",
        "Sample more replies a prompt. To keep the cost, divide batch.prompts by"
        f" {larger / size:.0f}.",
        (f"batch.group_size={larger:.0f}",),
    )


def equal_rewards(e: Evidence) -> Finding | None:
    """Report if rewards do not differ within groups, for whatever reason."""
    equal = e.mean("group/frac_zero_std")
    told = equal >= HARD and begins_high(e, "group/frac_zero_std")
    if not told or e.progress.rose or not compares_groups(e):
        return None
    return Finding(
        "equal",
        "The rewards of a group hardly ever differ.",
        f"All rewards were equal in {equal:.0%} of the groups; the mean reward is"
        f" {e.mean('reward/mean'):.2f}.",
        "Choose problems that are solved sometimes, or replace groups with equal rewards by new"
        " ones.",
        MIXED,
    )


def strong_kl(e: Evidence) -> Finding | None:
    """Report if the KL penalty allows less gain than the rewards offer.

    The best policy under a penalty β KL has π ∝ π_ref exp(R / β). To first order it gains Var R / β
    over the reference, with the variance within a prompt. This is σ / β standard deviations, or 1 /
    β if advantages are divided by σ.
    """
    coefs = e.values("kl/coef")
    coef = coefs[-1] if coefs else e.number("kl.coef")
    spread = spread_within(e.groups)
    if spread != spread:
        spread = e.mean("reward/std")
    normalised = "group" in str(e.setting("algorithm.normalization._target_", NONE))
    allowed = math.inf
    if coef > 0 and e.setting("kl.name", NONE) != NONE:
        allowed = (1.0 if normalised else spread) / coef
    told = e.mean("group/frac_zero_std") < HARD and not e.progress.rose
    if not (allowed < TIGHT and told):
        return None
    return Finding(
        "kl",
        "The KL penalty is too strong.",
        f"With kl.coef={coef:g} the penalty stops the reward from rising by more than about"
        f" {allowed * spread:.2g}, while the rewards of one prompt have a standard deviation of"
        f" {spread:.2g}.",
        "Train without it, or divide kl.coef by at least 10.",
        ("kl=none",),
    )


def loud_entropy(e: Evidence) -> Finding | None:
    """Report if the entropy bonus outweighs the reward."""
    coef = e.number("algorithm.entropy_coef")
    if not coef >= LOUD or e.progress.rose:
        return None
    return Finding(
        "entropy",
        "The entropy bonus is too strong.",
        f"With algorithm.entropy_coef={coef:g} the entropy went from"
        f" {e.mean('policy/entropy', 0):.2f} to {e.mean('policy/entropy', -1):.2f} nats a token.",
        "Train without it.",
        ("algorithm.entropy_coef=0",),
    )


def useless_critic(e: Evidence) -> Finding | None:
    """Report if the critic explains nothing of the returns although it has had time to learn."""
    explained = e.values("value/explained_variance")
    last = explained[-max(1, len(explained) // 3) :]
    if len(explained) < 4 or not fmean(last) < EXPLAINED:
        return None
    returned = e.mean("value/return_mean", -1)
    predicted = e.mean("value/mean", -1)
    apart = fmean(mean_gaps(e)[-len(last) :] or [0.0])
    begun = (mean_gaps(e) or [0.0])[0]
    stuck = apart > REST * begun and apart > APART * e.mean("reward/std")
    old = len(explained) >= YOUNG
    surely = old and fmean(last) + 2 * stdev(last) / math.sqrt(len(last)) < EXPLAINED
    if not (stuck or surely):
        return None
    means = f"It predicts {predicted:.2f} on average, while the returns average {returned:.2f}."
    rate = "algorithm.critic.optimizer.lr"
    if e.number(rate) == 0:
        head = e.setting("algorithm.critic.model") == "head"
        suited = HEAD_RATE if head else e.number("model.suggests.critic_lr")
        known = suited == suited
        return Finding(
            "critic",
            "The critic predicts nothing.",
            f"It is never trained, because {rate}=0. {means}",
            "Train it, or use an algorithm without a critic (algorithm=grpo).",
            (f"{rate}={suited:g}" if known else "algorithm=grpo",),
        )
    return Finding(
        "critic",
        "The critic predicts nothing.",
        f"In the last third of the steps it explained {fmean(last):.0%} of the returns' variance,"
        f" so its baseline does not help.{f' {means}' if stuck else ''}",
        f"Raise {rate} (now {e.setting(rate)}), or take the baseline from groups.",
        ("algorithm=grpo",),
    )


def mean_gaps(e: Evidence) -> list[float]:
    """Compute for each step the distance of the critic's mean prediction from the mean of the
    returns."""
    pairs = zip(e.values("value/mean"), e.values("value/return_mean"), strict=False)
    return [abs(predicted - returned) for predicted, returned in pairs]


def find_suited_rate(e: Evidence) -> float:
    """Return the learning rate suggested by the model; nan without a suggestion."""
    adapters = e.number("model.lora.rank") > 0
    return e.number(f"model.suggests.{'lora_lr' if adapters else 'lr'}")


def measure_distance(e: Evidence) -> float:
    """Return the policy's last KL from its start, in nats a token; nan if it was not measured."""
    return (e.values("kl/start") or e.values("kl/ref_k3") or [math.nan])[-1]


def steps_far(e: Evidence) -> bool:
    """Return whether steps move the policy too far. Either most steps do, or a few steps cost half
    of the reward.

    A few large steps alone are usual with several updates a step.
    """
    steps = e.values("kl/step") or [0.0]
    first = e.values("reward/mean")[0]
    lost = first > 0 and e.progress.last < LOST * first
    return median(steps) > FAR or (fmean(steps) > FAR and lost)


def find_rate_key(e: Evidence) -> str:
    """Return the key of the learning rate. A schedule other than `decay` ignores optimizer.lr."""
    end = "numbers.optimizer.lr._target_"
    functions = {key: str(own) for key, own in e.run.settings.items() if key.endswith(end)}
    others = [key for key, own in functions.items() if not own.endswith(".decay")]
    return others[0].removesuffix("._target_") if others else "optimizer.lr"


def read_rate(e: Evidence) -> float:
    """Return the highest learning rate of the run's steps."""
    return max(e.values("optim/lr"), default=e.number("optimizer.lr"))


def propose_rate(e: Evidence, rate: float) -> tuple[str, ...]:
    """Return the override of another rate; none if a schedule ignores it."""
    key = find_rate_key(e)
    return (f"{key}={rate:.3g}",) if key == "optimizer.lr" else ()


def high_rate(e: Evidence) -> Finding | None:
    """Report if too large steps destroy the policy."""
    rate = read_rate(e)
    suited = find_suited_rate(e)
    moved = e.mean("kl/step")
    still = measure_distance(e) < STILL
    if e.progress.rose or still or not (steps_far(e) or rate >= TIMES * suited):
        return None
    known = f", where {suited:g} suits this model" if suited == suited else ""
    far = "breaks the policy"
    if moved == moved:
        far = f"moves the policy by a KL of {moved:.2g} nats a token ({FAR:g} is too far)"
    return Finding(
        "rate_high",
        "The learning rate is too high.",
        f"At {find_rate_key(e)}={rate:g}{known}, a step {far}, and the reward went from"
        f" {e.progress.first:.2f} to {e.progress.last:.2f}.",
        "Lower the rate in a new run: the current policy is damaged.",
        propose_rate(e, suited if rate >= TIMES * suited else rate / TIMES),
    )


def frozen_policy(e: Evidence) -> Finding | None:
    """Report if the rewards of a group differed at first and no longer do, with many problems left
    unsolved. All replies to a prompt have become alike, so nothing more can be learned."""
    begun, late = e.values("group/frac_zero_std")[:1], e.mean("group/frac_zero_std", -1)
    entropy = [*e.values("policy/entropy")[:1], math.nan][0]
    unsolved = e.mean("group/frac_all_good", -1) < NEAR_BEST
    told = late >= HARD and begun and begun[0] < EQUAL and unsolved
    if not told or e.progress.rose or not compares_groups(e):
        return None
    moved = max(e.values("kl/step"), default=0.0)
    far = f", and a step moved the policy by up to {moved:.2g} nats a token" if moved > FAR else ""
    return Finding(
        "frozen",
        "The policy gives one reply to each prompt, and has stopped learning.",
        f"All rewards were equal in {begun[0]:.0%} of the groups of the first step, and in"
        f" {late:.0%} of those of the last third. The entropy went from {entropy:.2f} to"
        f" {e.mean('policy/entropy', -1):.2f} nats a token{far}.",
        "Begin again with smaller steps: without replies that differ, this policy stays as it is. A"
        " KL to the start (kl=k3 reference=frozen) may help too.",
        propose_rate(e, read_rate(e) / TIMES),
    )


def low_rate(e: Evidence) -> Finding | None:
    """Report if the policy has not moved although there was something to learn."""
    rate = read_rate(e)
    suited = find_suited_rate(e)
    moved = measure_distance(e)
    # with a gradient of 0 no rate moves the policy
    trained = e.steps >= LEAST and e.mean("optim/updates") > 0 and e.mean("optim/grad_norm") != 0
    still = moved < STILL and trained and e.mean("group/frac_zero_std") < HARD and not rate > suited
    if e.progress.rose or not (still or rate <= suited / TIMES):
        return None
    known = f", where {suited:g} suits this model" if suited == suited else ""
    return Finding(
        "rate_low",
        "The learning rate is too low.",
        f"At {find_rate_key(e)}={rate:g}{known}, the policy is {moved:.2g} nats a token from its"
        f" start after {e.steps} steps.",
        "Raise the rate.",
        propose_rate(e, suited if rate <= suited / TIMES else rate * TIMES),
    )


CHECKS: Sequence[Callable[[Evidence], Finding | None]] = (
    cut_replies,
    hot_sampling,
    high_rate,
    loud_entropy,
    useless_critic,
    low_rate,
)
# of runs that learn from rewards, and not from a teacher or from demonstrations
REWARDED: Sequence[Callable[[Evidence], Finding | None]] = (
    cut_replies,
    cold_sampling,
    hot_sampling,
    high_rate,
    frozen_policy,
    strong_kl,
    loud_entropy,
    useless_critic,
    hard_problems,
    easy_problems,
    small_groups,
    low_rate,
    equal_rewards,
)
