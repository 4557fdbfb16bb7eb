"""`rlkit prove`: expected updates by enumeration are exact, and the page says what they are."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch

from parametrise import each
from rlkit.commands.cli import main
from rlkit.config.experiment import experiment
from rlkit.config.problems.schedules import build_first_steps
from rlkit.errors import ConfigError
from rlkit.extras.bench import prove as bench
from rlkit.extras.bench.commands.prove import cell

EXACT = 1e-9  # of figures of order 1 in float64; an angle in degrees
ROOT = Path(__file__).resolve().parents[3]


def given(*overrides, **parts):
    x = experiment(*overrides, "generation.max_new_tokens=1", **parts)
    return next(iter(build_first_steps(x).values()))


def is_along(figures, scale):
    """Whether an update is the true gradient times `scale`, at every turn."""
    assert figures.angle < EXACT and figures.bias == pytest.approx(abs(1 - scale), abs=EXACT)
    assert [*figures.turns[0], *figures.turns[1], figures.scale] == pytest.approx(
        [scale] * 7, abs=EXACT
    )


def test_the_routes_are_all_episodes():
    """Their chances sum to 1, and those with a right answer to the expected reward."""
    with bench.use_float64():
        logits = torch.tensor(bench.OLD[0])
        chances = bench.score_routes(logits).logprobs.sum(1).exp()
        p = logits.softmax(-1)
        by_hand = p[0, 0] + p[0, 2] * (p[1, 0] + p[1, 2] * p[2, 0])
        assert float(chances.sum()) == pytest.approx(1, abs=EXACT)
        assert float(bench.compute_expected_reward(logits)) == pytest.approx(
            float(by_hand), abs=EXACT
        )
    assert torch.get_default_dtype() == torch.float32


def test_multisets_are_all_groups():
    """As many orders as there are, each as likely: the sum over ordered groups of any symmetric
    function."""
    chances = [0.1, 0.2, 0.3, 0.4]
    by_order = math.fsum(
        math.prod(chances[i] for i in rows) * sum(rows) ** 2
        for rows in itertools.product(range(4), repeat=3)
    )
    found = math.fsum(chance * sum(rows) ** 2 for rows, chance in bench.list_multisets(chances, 3))
    assert found == pytest.approx(by_order, abs=1e-12)


@pytest.mark.slow
@each(
    ("overrides", "size", "scale"),
    [
        (("algorithm=rloo", "kl=none"), 3, 1),
        (("algorithm=dr_grpo", "kl=none"), 2, 1 / 2),
        (("algorithm=rloo", "algorithm/advantage=turn_group_mean", "kl=none"), 3, 2 / 3),
        (("algorithm=max_rl", "kl=none"), 3, 1),
        (("algorithm=rloo", "kl=k1", "kl.placement=reward", "kl.coef=0.5"), 2, 1),
    ],
)
def test_the_expected_update_is_the_gradient(overrides, size, scale):
    """The leave-one-out baseline; a mean that includes the rollout itself, of a group and of each
    turn; the likelihood to order n - 1; and the regularised objective."""
    is_along(bench.prove(given(*overrides), size, 0), scale)


@pytest.mark.slow
def test_a_perfect_critic_makes_ppo_exact():
    """Whatever λ is, and with a KL in the reward that the critic foresees."""
    x = given(
        "algorithm=ppo",
        "algorithm/normalization=none",
        "algorithm/aggregation=sequence_sum",
        "kl=k1",
        "kl.placement=reward",
    )
    is_along(bench.prove(x, 2, 0), 1)


@pytest.mark.slow
def test_weights_of_whole_rollouts_make_stale_ones_exact():
    """No weight of this game reaches the cap of 2; weights of tokens do not suffice."""
    exact = given("algorithm=rloo", "algorithm/correction=sequence_truncate", "kl=none")
    is_along(bench.prove(exact, 2, 1), 1)
    assert bench.prove(given("algorithm=rloo", "kl=none"), 2, 1).angle > 1


@pytest.mark.slow
def test_the_deviation_of_a_group_weighs_problems_from_four_on():
    """Every group of three with two rewards has the same deviation; of four some have another."""
    x = given("algorithm=rloo", "algorithm/normalization=group", "kl=none")
    assert bench.prove(x, 3, 0).angle < EXACT < 0.1 < bench.prove(x, 4, 0).angle


@pytest.mark.slow
def test_a_part_of_ones_own_has_its_line(tmp_path, monkeypatch, capsys):
    """A constant baseline is unbiased; all else is rloo's."""
    (tmp_path / "my_baseline.py").write_text("def half(rewards):\n    return rewards - 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["prove", "advantage=my_baseline.half"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| `advantage=my_baseline.half` | 0.0° 1.00 0.00 ")
    assert main(["prove", "advantage=my_baseline.none"]) == 2
    assert "'my_baseline' has no 'none'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_estimator_of_ones_own_is_in_the_update(capsys):
    def cells(*words):
        assert main(["prove", *words]) == 0
        return capsys.readouterr().out.splitlines()[-1].partition("` |")[2]

    assert cells("kl_estimator=rlkit.functional.k3") == cells("algorithm=rloo", "kl=k3")
    assert main(["prove", "kl_estimator=rlkit.functional.k3", "kl=none"]) == 2
    assert "no effect without a KL" in capsys.readouterr().err


def test_a_value_loss_is_no_part_of_an_update(capsys):
    assert main(["prove", "value_loss=rlkit.functional.squared_error"]) == 2
    assert "value_loss" in capsys.readouterr().err


@pytest.mark.slow
def test_what_has_no_update_says_so():
    """All four of a group of two: every subset is the group itself."""
    assert cell(bench.prove(given("algorithm=pass_at_k", "kl=none"), 2, 0)) == "no update"
    x = given("algorithm=rloo", "kl=none")
    given_replies = x._replace(algorithm=x.algorithm._replace(episodes=print))
    with pytest.raises(ConfigError, match="algorithm=rloo does not learn from rewards of sampled"):
        bench.prove(given_replies, 2, 0)


def page_again():
    spec = importlib.util.spec_from_file_location("proofs", ROOT / "experiments/proofs/run.py")
    proofs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proofs)
    return proofs.PAGE.read_text(), proofs.remade


@pytest.mark.slow
def test_a_line_of_the_page_is_what_the_command_says():
    text, remade = page_again()
    [line] = [
        line for line in text.splitlines() if line.startswith("| `algorithm=cispo kl=none` |")
    ]
    assert remade(line) == line


@pytest.mark.slow
def test_the_page_shows_what_the_command_says():
    text, remade = page_again()
    assert text.count("\n| `") > 25 and remade(text) == text
