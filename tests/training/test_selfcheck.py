"""What is proved before the first step: verifiers that score gold answers, and a trainer that sees
what the sampler sampled."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch

from parametrise import each
from rlkit.config.problems.rows import check_truths, check_verifier
from rlkit.engines import Batched, Cached, Transformers
from rlkit.engines.transformers import complete
from rlkit.environments import by_task as environments_by_task
from rlkit.environments import calculator, get_weather, single_turn, tool_use
from rlkit.errors import DataError, EngineError, SelfCheckError, TemplateError
from rlkit.models import make_renderer
from rlkit.rewards import Reward, Term, by_task, exact_match, few_turns, numeric, weighted_sum
from rlkit.tasks import arithmetic
from rlkit.training.selfcheck import check_contexts, check_policy
from rlkit.types import Environment, Task


def reward_of(function) -> Reward:
    return Reward("mine", {"mine": Term(1.0, function)}, weighted_sum)


def rows(*answers):
    return [
        Task(f"rows.jsonl:{i}", ({"role": "user", "content": "?"},), a, "mine")
        for i, a in enumerate(answers, start=1)
    ]


# ---------------------------------------------------------------------------------------- verifiers


def test_gold_answers_that_score_and_empty_ones_that_do_not_pass():
    check_verifier(rows("7", "#### 1,000", "3/4"), reward_of(numeric))
    check_verifier(rows("yes"), reward_of(exact_match))


def test_a_gold_answer_that_does_not_score_names_its_row():
    """A wrong column, or a verifier for other rows, would train on rewards that are all 0."""
    with pytest.raises(
        DataError,
        match=(
            r"row rows.jsonl:2: the gold answer 'no number' scores None with reward 'mine', not 1"
        ),
    ):
        check_verifier(rows("7", "no number"), reward_of(numeric))
    with pytest.raises(DataError, match=r"row rows.jsonl:1: the gold answer '7' scores 0.5"):
        check_verifier(rows("7"), reward_of(lambda r: 0.5))


@each(
    "function",
    [
        numeric,
        few_turns,
        partial(numeric, wrong=-1.0),
        partial(by_task, rewards={"mine": partial(numeric)}),
    ],
)
@each("truth", [r"3\sqrt{2}", "10:30", "2k+2", "3,5,7", "two", "x = 5"])
def test_a_truth_that_is_not_one_number_names_its_row_wherever_it_is(truth, function):
    """Far behind the first rows too: it would be read in part, or leave its row out of every step
    without a word."""
    fine = rows(*map(str, range(300)), r"\frac{3}{4}", "#### 1,000", "18 apples", "- 5")
    check_truths(fine, reward_of(function), Environment())
    with pytest.raises(
        DataError,
        match=(
            r"row rows.jsonl:305: the gold answer '.*' of reward 'mine' is not one number.*\(1 more"
            r" rows are like it\)"
        ),
    ) as refusal:
        late = rows(*(task.answer for task in fine), truth, "6", "seven")
        check_truths(late, reward_of(function), Environment())
    assert f"'{truth}'" in str(refusal.value)


def test_truths_are_asked_of_terms_that_read_them_and_count():
    shadow = Reward(
        "mine", {"mine": Term(1.0, exact_match), "number": Term(0.0, numeric)}, weighted_sum
    )
    check_truths(rows("two"), shadow, Environment())
    by_row = partial(by_task, rewards={"mine": exact_match, "number": numeric})
    check_truths(rows("two"), reward_of(by_row), Environment())
    with pytest.raises(DataError, match=r"row rows.jsonl:1: the gold answer 'two'"):
        named = rows("two")[0]._replace(reward="number")
        check_truths([named], reward_of(by_row), Environment())


def test_an_empty_answer_that_counts_as_right_names_its_row():
    with pytest.raises(
        DataError, match=r"row rows.jsonl:1: an empty answer scores 1.0 with reward 'mine'"
    ):
        check_verifier(rows("7"), reward_of(lambda r: 1.0))


def test_an_empty_answer_may_be_unscored():
    check_verifier(rows("7"), reward_of(lambda r: 1.0 if r.final_content else None))


def test_a_verifier_that_scores_steps_is_tried_by_its_total():
    """A gold answer scored 0 by a term per step, and an empty one passed unseen."""

    def per_step(score):
        terms = {"mine": Term(1.0, lambda r: [score(r)] * len(r.steps), per_step=True)}
        return Reward("mine", terms, weighted_sum)

    check_verifier(rows("7"), per_step(lambda r: float(r.final_content == "7")))
    with pytest.raises(DataError, match=r"the gold answer '7' scores 0.5 with"):
        check_verifier(rows("7"), per_step(lambda r: 0.5))
    with pytest.raises(DataError, match=r"an empty answer scores 1.0 with"):
        check_verifier(rows("7"), per_step(lambda r: 1.0))


@pytest.mark.slow
def test_the_embedded_rows_pass(experiment):
    for split in ("train", "test"):
        check_verifier(experiment.task(split=split)[:32], experiment.evaluation.reward)


# ----------------------------------------------------------------------------------------- policies


@pytest.fixture(scope="module")
def tasks():
    return arithmetic(max_samples=2)


def with_engine(experiment, engine, **more):
    """`engine`: one, or a function that is one."""
    engine = engine if hasattr(engine, "load") else Batched(engine)
    settings = {"max_new_tokens": 12} | more
    return experiment._replace(generation=experiment.generation._replace(engine=engine, **settings))


def copied(policy):
    return policy._replace(model=copy.deepcopy(policy.model))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_right_scorer_passes_at_any_temperature(tiny, tasks, experiment, temperature):
    found = check_policy(tiny, tasks, with_engine(experiment, complete, temperature=temperature))
    assert (found.warnings, found.exact, found.bound) == ([], True, None)


def test_a_sampler_at_another_temperature_is_refused(tiny, tasks, experiment):
    """The most common silent bug: log-probs before temperature on one side, after it on the
    other."""

    def hotter(policy, contexts, seeds, params):
        return complete(
            policy, contexts, seeds, params._replace(temperature=params.temperature * 1.2)
        )

    with pytest.raises(SelfCheckError, match="log-probs of sampler and trainer differ by up to"):
        check_policy(tiny, tasks, with_engine(experiment, hotter))


def test_weights_that_change_between_sampling_and_scoring_are_refused(tiny, tasks, experiment):
    """A norm in another precision, a stale copy in the engine: the smallest change of the model
    shows."""
    policy = copied(tiny)

    def stale(policy, contexts, seeds, params):
        replies = complete(policy, contexts, seeds, params)
        with torch.no_grad():
            policy.model.model.norm.weight *= 1.05
        return replies

    with pytest.raises(SelfCheckError, match="training would be wrong"):
        check_policy(policy, tasks, with_engine(experiment, stale))


def test_log_probs_of_other_tokens_are_refused(tiny, tasks, experiment):
    """Off by one position."""

    def shifted(policy, contexts, seeds, params):
        replies = complete(policy, contexts, seeds, params)
        return [r._replace(logprobs=(*r.logprobs[1:], r.logprobs[0])) for r in replies]

    with pytest.raises(SelfCheckError):
        check_policy(tiny, tasks, with_engine(experiment, shifted))


def test_tokens_that_a_thinking_budget_wrote_are_no_difference(tiny, tasks, experiment):
    """The policy's own log-prob of a tag that was forced is far from the engine's 0."""
    seen = []

    def engine(policy, contexts, seeds, params):
        seen.extend(complete(policy, contexts, seeds, params))
        return seen[-len(contexts) :]

    limited = with_engine(experiment, engine)
    limited = limited._replace(generation=limited.generation._replace(max_thinking_tokens=1))
    assert check_policy(tiny, tasks, limited).warnings == []
    assert any(reply.forced for reply in seen)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Transformers, Cached])
def test_logits_that_change_behind_the_trainers_back_are_refused(tiny, tasks, experiment, engine):
    """A forward put in the place of the model's own is not what the trainer applies. An engine may
    leave it out too, and agree."""
    policy = copied(tiny)
    forward = policy.model.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 5 * torch.tanh(out.logits / 5)
        return out

    policy.model.forward = capped
    with pytest.raises(SelfCheckError, match="the trainer and the model's own forward differ"):
        check_policy(policy, tasks, with_engine(experiment, engine()))


def unknown(policy, contexts, seeds, params):
    """An engine that does not give log-probs."""
    return [
        r._replace(logprobs=(float("nan"),) * len(r.token_ids))
        for r in complete(policy, contexts, seeds, params)
    ]


def test_log_probs_that_are_not_numbers_are_refused(tiny, tasks, experiment):
    """Every comparison with nan is False, also that it is too large."""
    with pytest.raises(EngineError, match="not finite"):
        check_policy(tiny, tasks, with_engine(experiment, unknown))


def half(policy):
    return policy._replace(model=copy.deepcopy(policy.model).to(torch.bfloat16))


def off_by(gap, sampled_by=None):
    """An engine whose log-probs are too small by so many nats."""

    def engine(policy, contexts, seeds, params):
        return [
            r._replace(logprobs=tuple(p - gap for p in r.logprobs))
            for r in complete(sampled_by or policy, contexts, seeds, params)
        ]

    return engine


@pytest.mark.slow
def test_half_precision_is_compared_with_what_its_own_two_paths_differ_by(tiny, tasks, experiment):
    """A fixed limit of 0.05 nats passed over an error of 0.02 here, and lay on SmolLM2's noise."""
    policy = half(tiny)

    def check(gap):
        engine = off_by(gap)
        return check_policy(policy, tasks, with_engine(experiment, engine, max_new_tokens=32))

    right = check(0.0)
    assert right.warnings == [] and not right.exact
    assert right.bound < 0.01  # the tiny model's own paths differ by less than one in 200
    (line,) = check(0.02).warnings
    assert "sampler and trainer differ by 0.02" in line
    assert f"more than the {right.bound:.2g} expected from rounding" in line
    assert "own two paths, the whole sequence and token by token, differ by " in line
    with pytest.raises(
        SelfCheckError,
        match=r"sampler and trainer differ by 0.7.* a token on average, more than 0.5",
    ):
        check(0.7)
    few = with_engine(experiment, off_by(0.02), max_new_tokens=4)
    assert check_policy(policy, tasks, few).bound == pytest.approx(0.06)


def of_class(policy, written):
    """A half-precision copy whose class is `written` of that of the tiny model."""
    policy = half(policy)
    policy.model.__class__ = written(type(policy.model))
    return policy


def rounding_more_with_a_cache(tiny):
    class Rounding(tiny):
        def forward(self, input_ids=None, past_key_values=None, logits_to_keep=0, **kwargs):
            out = super().forward(
                input_ids=input_ids,
                past_key_values=past_key_values,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
            if past_key_values is not None and past_key_values.get_seq_length() > 0:
                out.logits[..., ::2] += 0.5
            return out

    return Rounding


@pytest.mark.slow
def test_a_model_whose_own_two_paths_differ_may_differ_as_much_and_a_fifth_more(
    tiny, tasks, experiment
):
    policy = of_class(tiny, rounding_more_with_a_cache)
    policy.model.train()
    policy.model.gradient_checkpointing_enable()  # in training mode it would give no cache
    hot = {"temperature": 2.0, "max_new_tokens": 32}  # where no token is nearly sure
    found = check_policy(policy, tasks, with_engine(experiment, complete, **hot))
    assert found.warnings == [] and 0.05 < found.bound < 0.2 and policy.model.training
    (line,) = check_policy(
        policy, tasks, with_engine(experiment, off_by(2 * found.bound, half(tiny)), **hot)
    ).warnings
    bound, own = re.search("than the (.*) expected .* token, differ by (.*) on", line).groups()
    assert float(bound) == pytest.approx(1.2 * float(own), rel=0.05) and float(own) > 0.03


def without_a_cache(tiny):
    class Uncached(tiny):
        def forward(self, input_ids=None, inputs_embeds=None, use_cache=None, logits_to_keep=0):
            return super().forward(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                use_cache=False,
                logits_to_keep=logits_to_keep,
            )

    return Uncached


@pytest.mark.slow
def test_a_model_without_a_cache_may_differ_as_real_models_do(tiny, tasks, experiment):
    policy = of_class(tiny, without_a_cache)

    def check(gap):
        engine = off_by(gap, half(tiny))
        return check_policy(policy, tasks, with_engine(experiment, engine)).warnings

    assert check(0.05) == []
    (line,) = check(0.08)
    assert "more than the 0.06 expected from rounding; the model's forward takes no cache" in line


def test_log_probs_that_are_not_numbers_are_refused_in_half_precision_too(tiny, tasks, experiment):
    with pytest.raises(EngineError, match="not finite"):
        check_policy(half(tiny), tasks, with_engine(experiment, unknown))


def test_a_prompt_that_does_not_fit_is_the_rows_fault(tiny, tasks, experiment):
    """Also where it is not among the first: the longest rows are measured, and the one that is too
    long is named."""
    long = tasks[0]._replace(
        id="rows.jsonl:9", messages=({"role": "user", "content": "How many? " * 99},)
    )
    with pytest.raises(
        DataError,
        match=r"row rows.jsonl:9: its prompt has \d+ tokens, and the model's context is 200",
    ):
        check_policy(
            tiny._replace(context_length=200),
            [*arithmetic(max_samples=8), long],
            with_engine(experiment, complete),
        )


def test_a_template_that_cannot_carry_the_tools_is_refused(tiny, tasks, experiment):
    tokenizer = copy.deepcopy(tiny.renderer.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match="does not write the tools"):
        check_policy(
            tiny._replace(renderer=make_renderer(tokenizer, tools="template")),
            tasks,
            with_engine(experiment, complete),
        )


def test_one_row_is_enough_to_check(tiny, tasks, experiment):
    assert check_policy(tiny, tasks[:1], with_engine(experiment, complete)).warnings == []


def test_the_tools_of_a_run_are_those_of_all_environments_that_its_rows_name(tiny, tasks):
    """The last row alone has the second tool. No row is opened twice, and an environment that no
    row names is not opened."""
    opened = []

    class Shop:
        def __init__(self, task):
            opened.append(task.id)

        def search(self, text: str) -> str:
            """Searches.

            Args:
                text: What for.
            """
            return text

    known = {
        "tool_use": tool_use(tools={"calculator": calculator, "shop": Shop}),
        "rare": tool_use(tools={"calculator": calculator, "get_weather": get_weather}),
        "none": single_turn(),
        "unused": tool_use(tools={"shop": Shop}),
    }
    many = arithmetic(max_samples=9)
    given = [*many, tasks[0]._replace(id="last", environment="rare")]
    lines, _ = check_contexts(tiny, given, environments_by_task(environments=known))
    place = f"{Shop.__module__}.{Shop.__qualname__}"
    assert lines == (
        f"tools: calculator, get_weather; search ({place})\n"
        "tool prompt: the template's (model.tools=template)\n"
    )
    assert len(set(opened)) == len(opened) == 4
    alone = [tasks[0]._replace(environment="none")]
    assert check_contexts(tiny, alone, environments_by_task(environments=known))[0] == ""


def test_a_run_shows_what_the_policy_reads_of_a_template_without_tools(tiny, toolless):
    """One prompt of each environment, with the list of tools and without an escape that a terminal
    obeys."""
    known = {"tool_use": tool_use(tools={"calculator": calculator}), "none": single_turn()}
    asked = Task("a", ({"role": "user", "content": "\x1b[2J?"},), environment="tool_use")
    given = [asked, asked._replace(id="b"), asked._replace(id="c", environment="none")]
    policy = tiny._replace(renderer=make_renderer(toolless))
    lines, prompts = check_contexts(policy, given, environments_by_task(environments=known))
    assert "tool prompt: rlkit's (model.tools=prompt)\n" in lines
    assert [line for line in prompts.splitlines() if "===" in line] == ["=== row b", "=== row c"]
    assert prompts.count('"name": "calculator"') == 1 and prompts.count("named SmolLM") == 1
    assert prompts.count("<|im_start|>user\n") == 2 and "\x1b" not in prompts
