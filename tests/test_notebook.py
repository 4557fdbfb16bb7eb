"""The notebooks' signatures: every name of docs/notebooks.md, every hook, and the slips that the notebooks had."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import rlkit
from rlkit import (
    Reward,
    Rollout,
    Step,
    Task,
    Term,
    ToolResult,
    aggregate_vector_rewards,
    attach_logprobs,
    compute_advantages,
    compute_advantages_and_returns,
    compute_forward_kl,
    compute_grpo_loss,
    compute_kl,
    compute_kl_divergence,
    compute_pairwise_loss,
    compute_policy_gradient_loss,
    compute_ppo_loss,
    compute_reverse_kl,
    compute_scalar_reward,
    compute_value_loss,
    compute_vector_reward,
    confident_share,
    create_adaptive_kl,
    create_dapo_config,
    create_ema_updater,
    create_grpo_config,
    create_kl_updater,
    create_pairwise_config,
    create_periodic_updater,
    create_ppo_config,
    create_reference_model,
    create_switch_strategy,
    create_truncated_kl,
    exact_match_reward,
    format_reward,
    get_algorithm_config,
    length_penalty,
    load_checkpoint,
    plot_training,
    save_checkpoint,
    stack_rollouts,
    tool_band_reward,
    tool_usage_reward,
    train_model,
    training_iteration,
    truncated_kl,
    update_ema_metrics,
    update_policy,
    update_reference_model,
)
from rlkit.errors import DataError
from rlkit.functional import best_worst, clipped, clipped_squared_error, k3, squared_error
from rlkit.models import LoRA
from rlkit.models.critic import make_critic
from rlkit.models.load import add_lora
from rlkit.notebook import CONFIGS, TrainingState
from rlkit.rewards import RewardError, numeric, smallest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "notebooks.md"
ROWS = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| in the")]
PROMPTS = ["What is 2 + 3?", "What is 10 - 4?"]
INF, NAN = float("inf"), float("nan")


# ------------------------------------------------------------------------------------------------- the page of names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_name_of_the_page_is_there_with_its_defaults(row):
    """Right-hand names are importable from rlkit, callable, and have the defaults that the page writes."""
    calls = re.findall(r"`(\w+(?:\([^`]*\))?)`", row[1]) + re.findall(r"`(create_dapo_config\([^`]*\))`", row[2])
    assert calls
    for call in calls:
        tree = ast.parse(call, mode="eval").body
        function = getattr(rlkit, tree.func.id if isinstance(tree, ast.Call) else tree.id)
        assert callable(function)
        for keyword in tree.keywords if isinstance(tree, ast.Call) else ():
            defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
            assert defaults[keyword.arg] == ast.literal_eval(keyword.value), f"{call}: {keyword.arg}"


def test_the_calls_of_the_page_run_as_written(tiny):
    page = re.search(r"\n    from rlkit import.*?\n\n## ", PAGE.read_text(), re.S)[0]
    code = "\n".join(line[4:] for line in page.splitlines() if line.startswith("    "))
    given = {"logprobs": torch.tensor([[-1.0]]), "ref_logprobs": torch.tensor([[-1.5]]), "iteration": 60}
    given |= {"model": tiny.model, "tokenizer": tiny.renderer.tokenizer, "prompt": PROMPTS[0], "my_custom_reward": lambda rollout: 0.25}
    exec(code, given)
    assert given["kl"].shape == (1,) and given["config"].algorithm.name == "dapo"
    assert given["rollout"].reward == 0.25 and given["rollout"].generation.response_ids


def test_defaults_are_not_shared_between_calls():
    """The notebooks share mutable defaults between instances."""
    assert create_grpo_config() is not create_grpo_config()
    assert hash((TrainingState().step, TrainingState().total_tokens)) and not TrainingState().metrics


# --------------------------------------------------------------------------------------------------------------- KL


@pytest.fixture
def distributions():
    """Log-probs of a policy and a reference over 5 tokens, each token a sequence of one: means over the policy's draws are sums."""
    generator = torch.Generator().manual_seed(0)
    policy, ref = (torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    return policy, ref


def test_reverse_kl_is_that_of_the_other_direction(distributions):
    """The slip: reverse KL as minus the forward one, which is negative."""
    policy, ref = distributions
    expected = (policy.exp() * compute_reverse_kl(policy[:, None], ref[:, None])).sum()
    torch.testing.assert_close(expected, (ref.exp() * (ref - policy)).sum())
    torch.testing.assert_close(
        (policy.exp() * compute_forward_kl(policy[:, None], ref[:, None])).sum(), (policy.exp() * (policy - ref)).sum()
    )


def test_truncated_kl_is_never_negative(distributions):
    """The slip: a clamp of one side alone."""
    policy, ref = torch.tensor([[-5.0, -0.1, -1.0]]).T, torch.tensor([[-0.1, -5.0, -1.0]]).T
    found = compute_kl(policy, ref, kl_fn=truncated_kl)
    assert (found >= 0).all() and found[2] == 0 and (found <= 1).all()
    assert torch.equal(found, create_truncated_kl(1.0)(policy, ref)) and not torch.equal(found, create_truncated_kl(0.5)(policy, ref))


def test_confident_kl_tells_that_no_token_qualifies():
    """The slip: 0 where no token is looked at reads like an agreement."""
    policy, ref = torch.tensor([[-3.0, -4.0], [-0.1, -4.0]]), torch.full((2, 2), -1.0)
    found = compute_kl(policy, ref, kl_fn=create_adaptive_kl(0.1))
    assert found[0] == 0 and found[1] > 0
    assert confident_share(policy).tolist() == [0.0, 0.5]


@pytest.mark.parametrize("kl_fn", [compute_forward_kl, compute_reverse_kl, truncated_kl, create_adaptive_kl(), k3])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_what_lies_under_the_mask_reaches_neither_value_nor_gradient(kl_fn, garbage):
    """The slip: nan from -inf under the mask."""
    policy = torch.tensor([[-1.0, garbage], [-2.0, -1.0]], requires_grad=True)
    ref, mask = torch.tensor([[-1.5, garbage], [-1.0, -1.0]]), torch.tensor([[1, 0], [1, 1]])
    kl = compute_kl(policy, ref, mask, kl_fn)
    kl.sum().backward()
    assert kl.shape == (2,) and kl.isfinite().all() and policy.grad.isfinite().all() and policy.grad[0, 1] == 0
    assert torch.equal(kl[:1].detach(), compute_kl(policy[:1, :1].detach(), ref[:1, :1], kl_fn=kl_fn))


def test_kl_fn_is_called_and_its_shape_checked():
    seen = []

    def kl_fn(policy_logprobs, ref_logprobs, mask):
        seen.append((policy_logprobs, mask))
        return policy_logprobs.sum(1)

    one = torch.tensor([-1.0, -2.0])
    assert compute_kl(one, one, kl_fn=kl_fn).tolist() == [-3.0] and seen[0][1].all()
    assert compute_kl(torch.tensor([-1.0, NAN]), one, torch.tensor([1, 0]), kl_fn).tolist() == [-1.0]
    with pytest.raises(ValueError, match=r"kl_fn gave shape \(1, 2\)"):
        compute_kl(one, one, kl_fn=lambda p, r, m: p)
    with pytest.raises(ValueError, match="shapes differ"):
        compute_kl(one, one[:1])


def test_kl_divergence_of_an_update_is_never_negative():
    old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert compute_kl_divergence(old, new) > 0 and compute_kl_divergence(old, old) == 0


# -------------------------------------------------------------------------------------------------------- references


class Small(nn.Module):
    """Two parameters of a name and a buffer."""

    def __init__(self, value: float, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(2, 2, dtype=dtype)
        self.register_buffer("seen", torch.tensor(value))
        for p in self.parameters():
            nn.init.constant_(p, value)


def weights(model):
    return torch.cat([p.detach().flatten().float() for p in (*model.parameters(), *model.buffers())])


def test_a_reference_is_a_copy_without_gradient():
    policy = Small(1.0)
    ref = create_reference_model(policy)
    policy.linear.weight.data += 1
    assert ref.linear.weight[0, 0] == 1 and not any(p.requires_grad for p in ref.parameters()) and not ref.training


def test_without_an_updater_the_reference_is_copied_by_name():
    ref, policy = Small(0.0), Small(2.0)
    policy._modules["linear"]._parameters = dict(reversed(policy.linear._parameters.items()))  # another order, the same names
    update_reference_model(ref, policy)
    assert torch.equal(weights(ref), torch.full((7,), 2.0))


def test_ema_of_bfloat16_moves():
    """The slip: at 0.999 a bfloat16 average does not move at all."""
    ref, policy, update = Small(1.0, torch.bfloat16), Small(2.0, torch.bfloat16), create_ema_updater(0.999)
    for _ in range(100):
        update(ref, policy)
    torch.testing.assert_close(weights(ref)[:-1], torch.full((6,), 2 - 0.999**100), rtol=0.01, atol=0)
    assert ref.seen == 2.0 and ref.linear.weight.dtype is torch.bfloat16


def test_periodic_goes_by_steps_or_by_calls():
    ref, policy, update = Small(0.0), Small(1.0), create_periodic_updater(3)
    for _ in range(2):
        update(ref, policy)
    assert ref.linear.weight[0, 0] == 0
    update(ref, policy)
    assert ref.linear.weight[0, 0] == 1
    other, update = Small(0.0), create_periodic_updater(20)
    update(other, policy, step=19)
    assert other.linear.weight[0, 0] == 0
    update(other, policy, step=20, kl=0.1)
    assert other.linear.weight[0, 0] == 1


def test_on_kl_refuses_to_go_without_a_kl():
    """The slip: an argument that callers do not pass."""
    ref, policy, update = Small(0.0), Small(1.0), create_kl_updater(0.5)
    with pytest.raises(TypeError, match="kl"):
        update(ref, policy)
    update(ref, policy, kl=0.3)
    assert ref.linear.weight[0, 0] == 0
    update_reference_model(ref, policy, update, step=2, kl=0.3)
    assert ref.linear.weight[0, 0] == 1


def test_an_updater_of_two_arguments_works():
    seen = []
    update_reference_model(Small(0.0), Small(1.0), lambda ref_model, policy_model: seen.append(policy_model), step=1, kl=0.1)
    update_reference_model(Small(0.0), Small(1.0), lambda ref_model, policy_model, step: seen.append(step), step=1, kl=0.1)
    assert len(seen) == 2 and seen[1] == 1


# --------------------------------------------------------------------------------------------- advantages and losses


def rollout(reward, *logprobs, group=0):
    """One rollout with a step for each tuple of log-probs."""
    steps, context = [], (1,)
    for step in logprobs:
        ids = tuple(range(10, 10 + len(step)))
        steps.append(Step((), context, ids, step, "stop"))
        context = (*context, *ids, 2)
    return Rollout(Task("t", ()), tuple(steps), group=group, reward=reward)


def with_gradient(*rollouts):
    """The same rollouts, log-probs as leaves."""
    return [r._replace(steps=tuple(s._replace(logprobs=torch.tensor(s.logprobs, requires_grad=True)) for s in r.steps)) for r in rollouts]


def test_stacked_tensors_hold_sampled_tokens_in_the_order_of_time():
    batch = stack_rollouts([rollout(1.0, (-1.0, -2.0), (-3.0,)), rollout(0.0, (-4.0,)), rollout(None)])
    assert batch.ids.tolist() == [[10, 11, 10], [10, 0, 0], [0, 0, 0]]
    assert batch.logprobs_sampler.tolist() == [[-1, -2, -3], [-4, 0, 0], [0, 0, 0]]
    assert batch.response_mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert batch.step_ids[0].tolist() == [0, 0, 1]


def test_tokens_that_a_thinking_budget_wrote_are_not_stacked(model):
    """They keep their place in the step, where their log-prob is 0, and the others keep theirs."""
    free = rollout(1.0, (-1.0, 0.0, -2.0), (0.0, -3.0))
    one = free._replace(steps=tuple(s._replace(forced=f) for s, f in zip(free.steps, ((1,), (0,)), strict=True)))
    batch = stack_rollouts(with_gradient(one))
    assert batch.logprobs_sampler.tolist() == [[-1, -2, -3]] and batch.ids.tolist() == [[10, 12, 11]]
    whole, attached = (attach_logprobs(model, [r])[0].steps for r in (free, one))
    wanted = [step.logprobs * torch.tensor(kept) for step, kept in zip(whole, ([1, 0, 1], [0, 1]), strict=True)]
    torch.testing.assert_close([s.logprobs for s in attached], wanted, rtol=0, atol=1e-5)  # float32, another number of rows in one product


def test_advantages_are_those_of_a_prompts_own_group():
    """The slip: four prompts that share one mean."""
    easy = [rollout(r, (-1.0,), group=0) for r in (1.0, 1.0)]
    hard = [rollout(r, (-1.0, -1.0), group=1) for r in (0.0, 0.5)]
    found = compute_advantages([*easy, *hard], normalize=False)
    assert found.tolist() == [[0, 0], [0, 0], [-0.25, -0.25], [0.25, 0.25]]
    assert compute_advantages([*easy, *hard])[3, 0] == pytest.approx(0.25 / (0.125**0.5 + 1e-4))


def test_a_group_of_one_has_no_nan():
    """The slip: the standard deviation of one element."""
    assert compute_advantages([rollout(3.0, (-1.0,))]).tolist() == [[0.0]]
    assert compute_value_loss(torch.tensor([[1.0]]), torch.tensor([[1.0]]))[1]["value_std"] == 0
    assert compute_ppo_loss(*[torch.tensor([[-1.0]])] * 2, torch.ones(1))[1]["ratio_std"] == 0


def test_policy_gradient_and_grpo_agree_on_policy():
    """At ratio 1 the clipped surrogate has the gradient of REINFORCE; each rollout counts the same, however long."""
    gradients = []
    for loss_fn in (compute_policy_gradient_loss, compute_grpo_loss):
        rollouts = with_gradient(rollout(1.0, (-1.0, -2.0)), rollout(0.0, (-1.0,)))
        loss_fn(rollouts, torch.tensor([[1.0, 1.0], [-1.0, NAN]])).backward()
        gradients.append([r.steps[0].logprobs.grad.tolist() for r in rollouts])
    assert gradients[0] == gradients[1] == [[-0.25, -0.25], [0.5]]


def test_pairs_are_of_one_prompt_ordered_by_reward_without_ties():
    """The slips: pairs over different prompts, ties trained."""
    rollouts = with_gradient(
        rollout(0.0, (-1.0,)), rollout(1.0, (-1.0, -1.0)), rollout(1.0, (-2.0,)), rollout(5.0, (-1.0,), group=1), rollout(None, (-1.0,))
    )
    everything = [(i, j) for i in range(5) for j in range(5) if i != j]
    loss = compute_pairwise_loss(rollouts, pair_selector=lambda given: everything)
    assert torch.equal(loss, compute_pairwise_loss(rollouts))
    margins = torch.tensor([-2.0 + 1.0, -2.0 + 1.0])  # sums of log-probs: better minus worse
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(0.1 * margins).mean())
    loss.backward()
    assert [r.steps[0].logprobs.grad.abs().sum() > 0 for r in rollouts] == [True, True, True, False, False]
    assert rollouts[0].steps[0].logprobs.grad[0] > 0  # the worst is pushed down
    assert compute_pairwise_loss(rollouts, pair_selector=best_worst) == compute_pairwise_loss(rollouts, pair_selector=lambda _: [(0, 1)])


def test_without_a_pair_the_loss_is_zero_with_a_gradient():
    """The slip: no pair crashes."""
    rollouts = with_gradient(rollout(1.0, (-1.0,)), rollout(1.0, (-2.0,)))
    loss = compute_pairwise_loss(rollouts)
    loss.backward()
    assert loss == 0 and rollouts[0].steps[0].logprobs.grad.tolist() == [0.0]


def test_ppo_loss_counts_under_the_mask_only():
    """The slip: never masked, so that padding is trained."""
    new = torch.tensor([[-1.0, -1.0, NAN], [-2.0, NAN, INF]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -2.0, 0.0], [-2.0, NAN, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss, stats = compute_ppo_loss(new, old, torch.tensor([1.0, -1.0]), mask)
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor((-1.0 - 1.2 + 1.0) / 3))
    assert stats["clipfrac"] == pytest.approx(1 / 3) and new.grad[mask == 0].eq(0).all()
    assert stats["ratio_mean"] == pytest.approx((2 + 2.718282) / 3) and stats["approx_kl"] > 0


def test_ppo_loss_takes_no_gradient_into_the_old_policy_or_the_advantages():
    new, old, advantages = (torch.tensor([[-1.0]], requires_grad=True) for _ in range(3))
    compute_ppo_loss(new, old, advantages)[0].backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None


def test_value_loss_broadcasts_nothing():
    """The slip: [B, T, 1] against [B]."""
    values, returns = torch.zeros(2, 3), torch.ones(2, 3)
    for wrong in (returns[..., None], returns[:, 0], returns[:, :1]):
        with pytest.raises(ValueError, match="shapes differ"):
            compute_value_loss(values, wrong)
    loss, stats = compute_value_loss(values, returns, mask=torch.tensor([[1, 0, 0], [1, 1, 0]]))
    assert loss == 0.5 and stats == {"value_mean": 0.0, "value_std": 0.0, "return_mean": 1.0}


def test_value_loss_is_clipped_where_asked():
    values, returns, old = torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]])
    assert compute_value_loss(values, returns, old)[0] == 0
    assert compute_value_loss(values, returns, old, clip_range=0.5)[0] == 0.125
    with pytest.raises(ValueError, match="old_values"):
        compute_value_loss(values, returns, clip_range=0.5)


def test_returns_stop_at_the_last_real_step():
    """The slip: values[:, -1] may be padding."""
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    values = torch.tensor([[0.5, 0.5, 99.0], [0.0, 0.0, 0.0]])
    advantages, returns = compute_advantages_and_returns(rewards, values, mask)
    delta = 0.99 * 0.5 - 0.5
    torch.testing.assert_close(advantages[0], torch.tensor([delta + 0.99 * 0.95 * 0.5, 0.5, 0.0]))
    torch.testing.assert_close(returns[1], torch.tensor([(0.99 * 0.95) ** 2, 0.99 * 0.95, 1.0]))
    plain = compute_advantages_and_returns(rewards, values, mask, use_gae=False)
    torch.testing.assert_close(plain.returns, torch.tensor([[0.99, 1.0, 0.0], [0.9801, 0.99, 1.0]]))
    torch.testing.assert_close(plain.advantages, (plain.returns - values) * mask)


# ----------------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_name_of_its_algorithm(name):
    assert CONFIGS[name]().algorithm.name == name


def test_numbers_hold_before_and_after_a_switch():
    """The slip: phases lose the user's numbers."""
    for iteration in (0, 49, 50, 99):
        config = get_algorithm_config(iteration, kl_coef=0.3, clip_range=0.15, learning_rate=3e-6)
        assert config.algorithm.name == ("grpo" if iteration < 50 else "dapo")
        assert config.kl.coef == 0.3 and config.learning_rate == 3e-6 and config.algorithm.policy_loss.keywords["clip_low"] == 0.15


def test_switch_strategy_is_called_and_may_name_a_config_of_ones_own():
    seen = []
    config = get_algorithm_config(7, lambda iteration: seen.append(iteration) or "pairwise", beta=0.2, kl_coef=0.4)
    assert seen == [7] and config.algorithm.advantage.keywords["beta"] == 0.2 and config.kl.coef == 0.4  # beta apart from the KL's
    mine = get_algorithm_config(0, lambda _: "mine", configs={"mine": lambda *, sharp: create_grpo_config(kl_coef=sharp)}, sharp=0.7)
    assert mine.kl.coef == 0.7
    with pytest.raises(ValueError, match=r"'mine' at iteration 0; choose one of grpo, dapo, pairwise, ppo"):
        get_algorithm_config(0, lambda _: "mine")
    config = get_algorithm_config(7, target_kl=0.1, max_refills=2, minibatches=3)
    assert config.algorithm[-4:-1] == (3, 0.1, 2) and create_ppo_config(critic_warmup=2, epochs=3).algorithm.critic.warmup == 2
    with pytest.raises(TypeError, match="no algorithm takes klcoef"):
        get_algorithm_config(0, klcoef=0.1)


def test_moving_averages_start_at_the_first_value():
    ema = update_ema_metrics({}, {"reward": 1.0, "kl": NAN})
    assert ema == {"reward": 1.0} and update_ema_metrics(ema, {"reward": 2.0})["reward"] == pytest.approx(1.1)


# ---------------------------------------------------------------------------------------------------------- training


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny.model).eval()


@pytest.fixture
def tokenizer(tiny):
    return tiny.renderer.tokenizer


def by_length(r):
    return float(r.response_length % 7)


def by_sample(r):
    return float(r.sample)


def iterate(model, tokenizer, config, reward_fn=by_sample, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return training_iteration(
        model, tokenizer, PROMPTS, optimizer, reward_fn=reward_fn, config=config._replace(group_size=2), max_new_tokens=8, **more
    )


def test_training_returns_the_model_and_its_statistics(model, tokenizer, tmp_path):
    """Two steps of 2 prompts × 2 samples: weights move, every number is logged apart, lines and checkpoints come when they should."""
    before, lines, saved = weights(model), [], []
    trained, statistics = train_model(
        model,
        tokenizer,
        PROMPTS,
        by_sample,
        steps=2,
        batch_size=2,
        max_new_tokens=16,
        save_every=1,
        output_dir=tmp_path,
        numbers={"group_size": 2, "kl_coef": 0.05},
        ref_update_fn=lambda ref, policy, step, kl: saved.append((step, kl)),
        progress=lines.append,
    )
    assert trained is model and not torch.equal(weights(model), before)
    assert [row["step"] for row in statistics] == [1, 2] and {row["algorithm"] for row in statistics} == {"grpo"}
    assert [row["reward"] for row in statistics] == [0.5, 0.5] and statistics[0]["kl_coef"] == 0.05
    assert abs(statistics[0]["kl"]) < 1e-6 < statistics[1]["kl"]
    assert saved == [(1, statistics[0]["kl"]), (2, statistics[1]["kl"])]
    total = int(sum(row["tokens"] for row in statistics))
    assert re.fullmatch(rf"step 2/2  loss -?\d+\.\d+  reward 0\.500  tokens {total:,}", lines[1])

    again = load_checkpoint(tmp_path)
    assert again.state.step == 2 and again.state.total_tokens == total
    torch.testing.assert_close(weights(again.model), weights(model))
    assert again.tokenizer.chat_template == tokenizer.chat_template
    assert load_checkpoint(tmp_path / "step_000001").state.step == 1
    with pytest.raises(DataError, match="no checkpoint"):
        load_checkpoint(tmp_path / "elsewhere")

    pytest.importorskip("matplotlib")
    plot_training(statistics, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_hook_of_training_is_called(model, tokenizer, tmp_path):
    """A strategy that switches, a reference, its updater, a KL, advantages, a loss and a checkpoint of the user's own."""
    seen: dict[str, list] = {
        name: [] for name in ("reward", "switch", "ref_model", "ref_update", "kl", "advantage", "loss", "checkpoint", "pairs")
    }

    def hook(name, result):
        return lambda *arguments: seen[name].append(arguments) or result(*arguments)

    train_model(
        model,
        tokenizer,
        PROMPTS,
        hook("reward", by_sample),
        steps=2,
        batch_size=2,
        max_new_tokens=4,
        switch_strategy=hook("switch", lambda step: ("grpo", "pairwise")[step]),
        numbers={"group_size": 2},
        ref_model_fn=hook("ref_model", create_reference_model),
        ref_update_fn=hook("ref_update", lambda ref, policy: None),
        kl_fn=hook("kl", lambda policy, ref, mask: (policy - ref).sum(1)),
        loss_fn=hook("loss", compute_policy_gradient_loss),
        pair_selector=hook("pairs", lambda rollouts: [(0, 1)]),
        checkpoint_fn=hook("checkpoint", lambda *_: None),
        output_dir=tmp_path,
        progress=None,
    )
    assert [step for (step,) in seen["switch"]] == [0, 1] and len(seen["reward"]) == 8 and len(seen["ref_model"]) == 1
    assert len(seen["ref_update"]) == 2 and len(seen["kl"]) > 0 and len(seen["loss"]) == 2 and len(seen["pairs"]) == 1
    assert seen["checkpoint"] == [(model, tokenizer, 2, str(tmp_path))]
    iterate(model, tokenizer, create_grpo_config(kl_coef=0.0), advantage_fn=hook("advantage", compute_advantages), normalize=False)
    assert seen["advantage"][0][1] is False


def test_a_loss_of_ones_own_trains_as_the_core_does(tiny, tokenizer):
    """compute_grpo_loss as a loss_fn gives the step that the config alone gives; so the log-probs it gets carry the gradient."""
    found = []
    for hooks in ({}, {"loss_fn": compute_grpo_loss}, {"loss_fn": compute_grpo_loss, "advantage_fn": compute_advantages}):
        model = copy.deepcopy(tiny.model).eval()
        iterate(model, tokenizer, create_grpo_config(kl_coef=0.0, max_grad_norm=1e9), **hooks)  # a clipped gradient has no scale
        found.append(weights(model) - weights(tiny.model))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found[2], found[0], rtol=1e-3, atol=1e-7)


def test_the_pairwise_config_has_the_gradient_of_the_pairwise_loss(tiny, tokenizer):
    """At the sampling policy: by the core's advantage, and by the loss itself as a loss_fn."""
    found = []
    for hooks in ({}, {"loss_fn": compute_pairwise_loss}):
        model = copy.deepcopy(tiny.model).eval()
        iterate(model, tokenizer, create_pairwise_config(kl_coef=0.0, max_grad_norm=1e9), **hooks)
        found.append(weights(model) - weights(tiny.model))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)


def test_equal_rewards_give_no_advantage_but_the_kl(model, tokenizer):
    """The slip: KL subtracted before group statistics turns equal rewards into advantages of ±1.5. The log keeps reward and KL apart."""
    seen = []

    def loss_fn(rollouts, advantages):
        seen.append(advantages)
        return compute_policy_gradient_loss(rollouts, advantages)

    state, _ = iterate(
        model,
        tokenizer,
        create_grpo_config(kl_coef=0.1),
        reward_fn=lambda r: 1.0,
        kl_fn=lambda policy, ref, mask: torch.arange(4.0),
        loss_fn=loss_fn,
        ref_model=create_reference_model(model),
    )
    torch.testing.assert_close(seen[0][:, 0], -0.1 * torch.arange(4.0))
    assert state.metrics["reward"] == 1.0 and state.metrics["kl_coef"] == 0.1


def test_a_loss_that_needs_no_advantages_is_trained_without_any(model, tokenizer):
    """Equal rewards leave a loss_fn its gradient, since it may be made of anything."""
    before = weights(model)
    seen: list = []

    def loss_fn(rollouts, advantages):
        seen.append(advantages)
        return -torch.cat([step.logprobs for r in rollouts for step in r.steps]).mean()

    state, _ = iterate(model, tokenizer, create_grpo_config(kl_coef=0.0), reward_fn=lambda r: 1.0, loss_fn=loss_fn)
    assert not seen[0].any() and not torch.equal(weights(model), before) and state.metrics["optim/updates"] == 1


def test_ppo_freezes_what_is_old_and_computes_the_rest_anew(model, tokenizer):
    """The slips of the PPO trainer: log-probs never recomputed, clip_value ignored, whitening over the minibatch."""
    seen = []

    def policy_loss(ratio, advantages, response_mask):
        seen.append({"ratio": ratio.detach()[response_mask], "advantages": advantages[response_mask]})
        return clipped(ratio, advantages)

    def value_loss(values, values_old, returns, response_mask):
        seen[-1] |= {"values": values.detach()[response_mask], "old": values_old[response_mask]}
        return squared_error(values, returns)

    config = create_ppo_config(epochs=2, group_size=2, learning_rate=1e-3, kl_coef=0.0)
    critic = config.algorithm.critic._replace(loss=value_loss)
    config = config._replace(algorithm=config.algorithm._replace(policy_loss=policy_loss, critic=critic, minibatches=2))
    best = lambda r: float(r.group == r.sample == 0)  # noqa: E731  (no two of a minibatch cancel)
    _, statistics = train_model(model, tokenizer, PROMPTS, best, steps=1, batch_size=2, max_new_tokens=8, config=config, progress=None)
    assert statistics[0]["value_loss"] > 0 and len(seen) == 4
    assert (seen[0]["ratio"] - 1).abs().max() < 1e-4 < (seen[3]["ratio"] - 1).abs().max()
    assert all((update["old"] == 0).all() for update in seen)  # a fresh value head says 0
    assert (seen[0]["values"] == 0).all() and (seen[3]["values"] != 0).any()
    whole = torch.cat([update["advantages"] for update in seen[:2]])
    assert whole.mean().abs() < 1e-5 and whole.std() == pytest.approx(1, abs=1e-4)
    assert not any(update["advantages"].mean().abs() < 1e-5 for update in seen[:2])
    clip = create_ppo_config(value_clip_range=0.3).algorithm.critic.loss
    assert clip.func is clipped_squared_error and clip.keywords == {"clip": 0.3}


def test_prompts_without_a_signal_take_no_step(model, tokenizer):
    before = weights(model)
    state, _ = iterate(model, tokenizer, create_dapo_config(), reward_fn=lambda r: 1.0)
    assert torch.equal(weights(model), before) and state.step == 1 and state.metrics["reward"] == 1.0


def test_what_would_do_nothing_is_refused(model, tokenizer):
    """The slip: a configured coefficient without a reference does nothing."""
    run = partial(iterate, model, tokenizer)
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs a ref_model"):
        run(create_grpo_config())
    with pytest.raises(ValueError, match="kl_fn is given, and the coefficient"):
        run(create_dapo_config(), kl_fn=truncated_kl)
    with pytest.raises(ValueError, match="ref_update_fn has no ref_model"):
        run(create_dapo_config(), ref_update_fn=create_ema_updater())
    with pytest.raises(ValueError, match="compares no pairs"):
        run(create_dapo_config(), pair_selector=best_worst)
    with pytest.raises(ValueError, match="needs a critic"):
        run(create_ppo_config(kl_coef=0.0))
    with pytest.raises(ValueError, match="not both"):
        train_model(model, tokenizer, PROMPTS, by_sample, config=create_grpo_config(), numbers={"kl_coef": 1.0})


def test_rollouts_that_are_there_already_are_trained_on(model, tokenizer):
    """attach_logprobs and update_policy on rollouts of one's own, PPO with a critic of one's own."""
    _, rollouts = iterate(model, tokenizer, create_dapo_config(), reward_fn=by_length)
    attached = attach_logprobs(model, rollouts)
    batch = stack_rollouts(attached)
    assert batch.logprobs_sampler.requires_grad
    torch.testing.assert_close(batch.logprobs_sampler.detach(), stack_rollouts(rollouts).logprobs_sampler, rtol=0, atol=0.05)
    kept, model.lm_head.weight.data = attached[0].metadata["old_logprobs"], model.lm_head.weight.data + 0.01
    again = attach_logprobs(model, attached)[0]
    assert torch.equal(again.metadata["old_logprobs"], kept) and not torch.equal(again.steps[0].logprobs, attached[0].steps[0].logprobs)
    critic = make_critic(model, model="head")
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=1e-3)
    figures = update_policy(model, rollouts, optimizer, create_ppo_config(kl_coef=0.0, epochs=1), critic=critic)
    assert figures["value_loss"] >= 0 and figures["kl_coef"] == 0


def test_adapters_are_saved_and_loaded(model, tokenizer, tmp_path):
    policy = add_lora(model, LoRA(rank=2))
    save_checkpoint(policy, tokenizer, 5, tmp_path)
    assert (tmp_path / "step_000005" / "adapter_config.json").exists()
    again = load_checkpoint(tmp_path).model
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    found = {n: p for n, p in again.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys() and all(torch.equal(found[n], trained[n]) for n in trained)


def test_adapters_are_trained_beside_a_reference_that_moves(model, tokenizer):
    policy = add_lora(model, LoRA(rank=2))
    base = model.model.layers[0].mlp.up_proj.base_layer.weight.clone()
    before = {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
    trained, statistics = train_model(
        policy, tokenizer, PROMPTS, by_sample, steps=2, batch_size=2, max_new_tokens=4, progress=None,
        numbers={"group_size": 2}, ref_update_fn=create_ema_updater(0.5),
    )  # fmt: skip
    assert any(not torch.equal(p, before[n]) for n, p in trained.named_parameters() if n in before)
    assert torch.equal(model.model.layers[0].mlp.up_proj.base_layer.weight, base) and statistics[1]["kl"] >= 0


def test_a_run_goes_on_from_its_state(tiny, tokenizer):
    """step is not always 0: prompts, seeds and the switch go on where they were."""
    rows = []
    for state in (TrainingState(), TrainingState(step=1)):
        _, statistics = train_model(
            copy.deepcopy(tiny.model), tokenizer, PROMPTS, by_sample, steps=2, batch_size=1, max_new_tokens=4, state=state, progress=None,
            numbers={"group_size": 2, "kl_coef": 0.0}, switch_strategy=create_switch_strategy("grpo", "dapo", at=1),
        )  # fmt: skip
        rows.append([(row["step"], row["algorithm"]) for row in statistics])
    assert rows == [[(1, "grpo"), (2, "dapo")], [(2, "dapo")]]


# ----------------------------------------------------------------------------------------------------------- rewards


def said(content: str, truth: str = "", calls: str = "") -> Rollout:
    """`calls`: o worked, f failed."""
    results = tuple(ToolResult(f"call_{i}", "calculator", "", ok=c == "o") for i, c in enumerate(calls))
    return Rollout(Task("t", (), truth), (Step((), (), (), (), "stop", content=content, tool_results=results),))


def test_a_vector_is_named_and_becomes_one_number_before_it_is_trained_on(model, tokenizer):
    """The slips: a vector broadcast over tokens; what cannot be scored counted as 0."""
    parts = {"correctness": numeric, "safety": lambda r: 1.0, "helpfulness": lambda r: 0.5}
    weights = {"correctness": 0.5, "safety": 0.3, "helpfulness": 0.2}
    vector = compute_vector_reward(said("#### 7", "7"), parts)
    assert vector == {"correctness": 1.0, "safety": 1.0, "helpfulness": 0.5} and compute_scalar_reward(said("8", "7"), numeric) == 0.0
    assert aggregate_vector_rewards(vector, weights) == pytest.approx(0.9) and aggregate_vector_rewards(vector, weights, smallest) == 0.1
    unknown = compute_vector_reward(said("7"), parts)
    assert unknown["correctness"] is None and aggregate_vector_rewards(unknown, weights) is None
    assert aggregate_vector_rewards(unknown, {"safety": 0.3}) == 0.3  # correctness is only logged
    reward = Reward("vector", {name: Term(weights[name], fn) for name, fn in (parts | {"correctness": by_sample}).items()})
    _, rollouts = iterate(model, tokenizer, create_dapo_config(), reward_fn=reward)
    assert all(r.rewards.keys() == parts.keys() and isinstance(r.reward, float) for r in rollouts)


def test_the_notebooks_rewards():
    """Equality and whole words instead of substrings, no reward for calls that failed, no score for an empty truth."""
    words = " ".join(["w"] * 50)
    assert [length_penalty(said(text)) for text in ("short", words, words * 11)] == [-0.5, 0.0, -0.3]
    assert [format_reward(r"#### \d+")(said(text)) for text in ("#### 7", "7")] == [1.0, 0.0]
    exact = exact_match_reward(lambda r: r.task.metadata.get("gold", "10"))
    assert [exact(said(text)) for text in ("10", " 10 ", "1", "100")] == [1.0, 1.0, 0.0, 0.0]
    assert exact_match_reward(lambda r: "")(said("")) is None
    assert exact_match_reward(lambda r: "b", str.upper)(said("B")) == 1.0
    assert [tool_usage_reward()(said("", calls=c)) for c in ("", "f", "o", "fo", "oooo")] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert tool_usage_reward(2)(said("", calls="of")) == 0.0
    assert [tool_band_reward()(said("", calls=c)) for c in ("", "fff", "o", "ooo", "oooo")] == [0.0, 0.0, 1.0, 1.0, 0.5]


def test_a_reward_that_fails_is_no_zero():
    with pytest.raises(RewardError, match="no answer"):
        compute_scalar_reward(said(""), lambda r: r.task.metadata["no answer"])


@pytest.mark.gpu
def test_advantages_on_the_cpu_meet_log_probs_on_the_gpu():
    """The slip: CPU advantages against GPU log-probs."""
    rollouts = [rollout(float(i), (-1.0, -2.0)) for i in range(2)]
    advantages = compute_advantages(rollouts)
    moved = [
        r._replace(steps=tuple(s._replace(logprobs=torch.tensor(s.logprobs, device="cuda", requires_grad=True)) for s in r.steps))
        for r in rollouts
    ]
    for loss_fn in (compute_policy_gradient_loss, compute_grpo_loss, compute_pairwise_loss):
        loss_fn(moved, advantages).backward()
    assert all(r.steps[0].logprobs.grad.abs().sum() > 0 for r in moved)
    on_gpu = torch.tensor([[-1.0, -2.0]], device="cuda")
    assert compute_ppo_loss(on_gpu, on_gpu.cpu(), torch.ones(1))[0].device == on_gpu.device
    assert compute_kl(on_gpu, on_gpu.cpu(), torch.ones(1, 2)).device == on_gpu.device
