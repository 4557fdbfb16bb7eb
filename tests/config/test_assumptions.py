"""Parts declare what they assume and what they give, and a composition that breaks an assumption is
refused with what to choose."""

from __future__ import annotations

import functools

import pytest
import torch

from parametrise import available, cases, each
from rlkit import rewards
from rlkit.config.compose import compose, experiment
from rlkit.config.problems import find_problems
from rlkit.config.problems.assumptions import assumption_problems, assumption_warnings
from rlkit.config.problems.rows import load_tasks
from rlkit.episodes import assemble
from rlkit.errors import ConfigError
from rlkit.training.update.sampled import filter_rollouts
from rlkit.types import Rollout, Step, Task, assumes, declarations, gives, keeps

# ------------------------------------------------------------------------------------- declarations


def test_only_words_of_the_lists_can_be_declared():
    for declare in (assumes, gives, keeps):
        with pytest.raises(ValueError, match=r"'binry'.*there are: .*binary"):
            declare("binry")


def test_a_declaration_is_seen_through_wrappers_and_depends_on_numbers():
    assert declarations(rewards.numeric, "gives") == {"binary", "non_negative", "raw"}
    assert declarations(functools.partial(rewards.numeric, wrong=-1.0), "gives") == {"raw"}
    assert declarations(
        functools.partial(functools.partial(rewards.numeric, wrong=-1.0), wrong=0.0), "gives"
    ) >= {"binary"}

    @functools.wraps(rewards.code_exec)
    def timed(*args, **kwargs):
        return rewards.code_exec(*args, **kwargs)

    assert declarations(timed, "gives") >= {"binary"} and declarations(
        functools.partial(timed, credit="share"), "gives"
    ) == {
        "non_negative",
        "raw",
    }
    assert (
        declarations(lambda rollout: 1.0, "gives") is None
        and declarations(rewards.group_normalised, "keeps") == set()
    )


REPLIES = ["#### 4", "#### 5", "", "four", "call it #### 4 or 4"]


@each(
    "part",
    [
        rewards.numeric,
        rewards.exact_match,
        rewards.contains,
        functools.partial(rewards.format_match, pattern="#"),
        functools.partial(rewards.numeric, wrong=-1.0),
        rewards.few_turns,
        rewards.length,
        rewards.soft_length,
        rewards.repetition,
        rewards.tool_usage,
    ],
)
def test_scores_are_what_their_function_gives(part):
    words = declarations(part, "gives")
    for reply in REPLIES:
        score = part(
            Rollout(
                Task("t", (), answer="4"),
                (Step((), (), (1,) * 500, (0.0,) * 500, "stop", content=reply),),
            )
        )
        assert score in (None, 0.0, 1.0) or "binary" not in words
        assert score is None or score >= 0 or "non_negative" not in words


def test_every_shipped_part_that_changes_or_gives_rewards_declares_it():
    """But those whose scores are somebody else's: of an environment, of another package, of the
    rows."""
    import yaml

    from rlkit import functional
    from rlkit.config.compose import conf_dir
    from rlkit.config.schema import resolve

    def targets(folder):
        for path in (conf_dir() / folder).glob("*.yaml"):
            if not available(f"{folder}={path.stem}"):
                continue
            node = yaml.safe_load(path.read_text())
            terms = [term["fn"]["_target_"] for term in node.get("terms", {}).values()]
            yield from map(resolve, terms or [node["_target_"]])

    own = {rewards.environment, rewards.by_task}
    assert {part for part in targets("reward") if declarations(part, "gives") is None} <= own
    assert all(
        declarations(part, "keeps") is not None
        for part in [*targets("reward/aggregator"), *targets("algorithm/overlong")]
    )
    assert declarations(functional.max_rl, "assumes") == {"non_negative_rewards"}


# ---------------------------------------------------------------------------------- what is refused

BROKEN = {
    "max_rl divides by the mean of the group": (
        ["algorithm=max_rl", "reward=numeric", "reward.normalize=true"],
        "reward.normalize",
    ),
    "of rewards that may be negative": (
        ["algorithm=max_rl", "reward=length"],
        r"reward.terms.length \(.*length\)",
    ),
    "that an overlong rule takes from": (
        ["algorithm=max_rl", "reward=numeric", "algorithm/overlong=penalty"],
        "overlong=none",
    ),
    "or a KL": (
        [
            "algorithm=max_rl",
            "reward=numeric",
            "kl=k1",
            "kl.placement=reward",
            "kl.in_baseline=true",
        ],
        "kl.in_baseline",
    ),
    "or a weight": (
        ["algorithm=max_rl", "reward=numeric", "reward.terms.numeric.weight=-1"],
        "numeric.weight=-1",
    ),
    "pass_at_k counts right answers": (
        ["algorithm=pass_at_k", "reward=numeric", "reward.normalize=true"],
        "reward.normalize",
    ),
    "by a threshold": (
        ["algorithm=pass_at_k", "reward=numeric", "reward.terms.numeric.weight=0.4"],
        "numeric.weight=0.4.*set it to 1",
    ),
    "above which a format may be": (
        ["algorithm=pass_at_k", "reward=[numeric,format]"],
        "joins numeric, format",
    ),
    "or a share of tests": (
        ["algorithm=pass_at_k", "reward=code_exec", "reward.terms.code_exec.fn.credit=share"],
        "code_exec",
    ),
    "a penalty of 1 on another scale": (
        ["algorithm=dapo", "reward=numeric", "reward.normalize=true"],
        "overlong.*reward.normalize",
    ),
    "or on the group's": (
        ["algorithm=dapo", "reward=[numeric,format]", "reward/aggregator=group_normalised"],
        "algorithm.overlong.*group_normalised",
    ),
    "a limit that no reply reaches": (
        ["algorithm=dapo", "algorithm.overlong.limit=9999"],
        "limit=9999.*max_new_tokens=.*soft_length",
    ),
}


@pytest.mark.parametrize("overrides, words", cases(BROKEN.values(), 1, unpack=True), ids=BROKEN)
def test_a_broken_assumption_is_refused_with_what_to_choose(overrides, words):
    with pytest.raises(ConfigError, match=words):
        experiment(compose(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    cases(
        [
            ["algorithm=max_rl"],
            ["algorithm=max_rl", "reward=[numeric,format]", "reward.terms.format.weight=0.1"],
            ["algorithm=pass_at_k", "reward=[numeric,length]", "reward.terms.length.weight=0"],
            ["algorithm=pass_at_k", "reward=[numeric,format]", "reward/aggregator=product"],
            ["algorithm=grpo", "reward=length", "reward.normalize=true"],
            ["algorithm=dapo", "reward=[numeric,format]"],
        ],
        2,
    ),
    ids=" ".join,
)
def test_what_holds_is_taken(overrides):
    x = experiment(compose(overrides))
    assert assumption_problems(x) == assumption_warnings(x) == []


@pytest.mark.slow
def test_a_group_filter_reads_rewards_that_are_not_normalised():
    """As in a refill; the update shows it the same ones."""

    @assumes("raw_rewards")
    def above_half(rewards):
        return rewards > 0.5

    x = experiment(compose(["algorithm=grpo", "reward=numeric", "reward.normalize=true"]))
    x = x._replace(algorithm=x.algorithm._replace(group_filter=above_half))
    assert assumption_problems(x) == []


@pytest.mark.slow
def test_a_phase_is_checked_by_its_own_reward():
    words = ["schedule=grpo_to_dapo", "algorithm@schedule.phases.refine.algorithm=max_rl"]
    with pytest.raises(ConfigError, match=r"schedule\.phases\.refine: algorithm\.advantage"):
        experiment(compose([*words, "reward=length"]))


@pytest.mark.slow
def test_rows_that_name_their_reward_are_checked_when_they_are_there():
    """The config leaves open what by_task scores with; the rows of guess_number name a reward that
    is not 0 or 1."""
    x = experiment(compose(["algorithm=pass_at_k", "task.max_samples=8", "evaluation.n=0"]))
    assert load_tasks(x)[0]
    other = experiment(
        compose(
            [
                "algorithm=pass_at_k",
                "task=guess_number",
                "environment=guess_number",
                "evaluation.n=0",
            ]
        )
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"algorithm.advantage \(.*pass_at_k_advantage\) assumes that rewards are 0 or"
            r" 1.*few_turns"
        ),
    ):
        load_tasks(other)


def test_a_part_from_outside_is_taken_and_named():
    """It assumes nothing and guarantees nothing."""

    def mine(rollout):
        return 1.0

    def strict(rewards, group_ids):
        return rewards

    x = experiment(compose(["algorithm=max_rl", "reward=numeric"]))
    term = x.reward.terms["numeric"]
    own = x._replace(reward=x.reward._replace(terms={"numeric": term._replace(fn=mine)}))
    assert find_problems(own) == []
    (text,) = assumption_warnings(own)
    assert "reward.terms.numeric does not say" in text and "gives('non_negative')" in text
    marked = own._replace(
        reward=own.reward._replace(terms={"numeric": term._replace(fn=gives("binary")(mine))})
    )
    assert assumption_warnings(marked) == []
    assert assumption_warnings(own._replace(algorithm=x.algorithm._replace(advantage=strict))) == []


@pytest.mark.slow
def test_a_limit_of_episodes_below_one_reply_is_a_warning():
    (text,) = assumption_warnings(
        experiment(
            compose(
                [
                    "reward=[numeric,soft_length]",
                    "environment=tool_use",
                    "generation.max_new_tokens=513",
                ]
            )
        )
    )
    assert "soft_length.fn.limit=512" in text and "overlong=penalty" in text


# ------------------------------------------------------------------------------------------ budgets


def test_the_penalty_of_length_is_of_a_reply_and_a_right_answer_after_ten_turns_keeps_its_reward():
    x = experiment(compose(["algorithm=dapo", "generation.max_new_tokens=100"]))

    def played(turns: int, tokens: int, group: int) -> Rollout:
        step = Step(
            ({"role": "user", "content": "?"},),
            (1,),
            (2,) * tokens,
            (-1.0,) * tokens,
            "stop",
            content="4",
        )
        steps = [step._replace(prompt_ids=(1, *(2,) * tokens * i)) for i in range(turns)]
        return Rollout(Task("t", ()), tuple(steps), reward=1.0, group=group)

    batch = assemble([played(10, 50, 0), played(1, 90, 0), played(2, 100, 0)], pad_token_id=0)
    assert batch.lengths.tolist() == [500, 90, 200] and batch.reply_lengths.tolist() == [
        50,
        90,
        100,
    ]
    torch.testing.assert_close(
        filter_rollouts(batch, x.algorithm).rewards, torch.tensor([1.0, 0.5, 0.0])
    )
