"""Reference policies: each moves by its rule and no other, under LoRA none costs a second copy, and
none scores nothing."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from parametrise import cases, product
from rlkit.algorithm import KL
from rlkit.config.compose import compose, experiment
from rlkit.models import LoRA, forward_logprobs, pack
from rlkit.models.load import add_lora
from rlkit.models.save import save_policy
from rlkit.training import references as reference
from rlkit.training.reference_states import ReferenceStates
from rlkit.training.schedules.progress import Progress

IDS = torch.tensor([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]])
MASK = torch.tensor([[False, False, True, True, True], [False, True, True, False, True]])


def scores(model):
    with torch.no_grad():
        return forward_logprobs(model, pack(IDS, MASK))[0]


def reference_scores(kept, state, model):
    with kept.model(state, model) as scored:
        return forward_logprobs(scored, pack(IDS, MASK))[0]


def train_one_step(model):
    """One large step, so that the policy surely moves."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    optimizer.zero_grad()
    forward_logprobs(model, pack(IDS, MASK))[0].sum().backward()
    optimizer.step()


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny.model)


def test_frozen_does_not_move_when_the_policy_does(model):
    start = scores(model)
    kept = reference.frozen()
    state = kept.init(model)
    train_one_step(model)
    state = kept.update(state, model, step=1, kl=0.1)
    assert not torch.equal(scores(model), start)
    assert torch.equal(reference_scores(kept, state, model), start)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [[], ["reference"]])
def test_a_phase_that_resets_the_reference_compares_with_the_policy_of_that_moment(model, reset):
    x = experiment(
        compose(["schedule=on_reward", "kl=k3", "reference=frozen", "trainer.accelerator=cpu"])
    )
    refine = x.schedule.phases["refine"]._replace(reset=reset)
    x = x._replace(schedule=x.schedule._replace(phases=x.schedule.phases | {"refine": refine}))
    start = scores(model)
    states = ReferenceStates(x, model)
    train_one_step(model)
    fresh = states.enter(Progress(step=1, phase=1, since=1), x.reference)
    with states.reference(x.reference) as scored:
        found = forward_logprobs(scored, pack(IDS, MASK))[0]
    assert fresh == bool(reset)
    assert torch.equal(found, scores(model) if reset else start)
    assert states.is_policy(x.reference) == bool(reset)


@pytest.mark.slow
def test_a_reference_that_starts_again_in_a_phase_without_a_kl_is_the_one_of_later_phases(model):
    x = experiment(
        compose(["schedule=on_reward", "kl=k3", "reference=frozen", "trainer.accelerator=cpu"])
    )
    last = x.schedule.phases["refine"]
    quiet = last._replace(reset=["reference"], kl=KL("none"))
    x = x._replace(
        schedule=x.schedule._replace(phases=x.schedule.phases | {"refine": quiet, "last": last})
    )
    states = ReferenceStates(x, model)
    train_one_step(model)
    then = scores(model)
    states.enter(Progress(step=1, phase=1, since=1), x.reference)
    train_one_step(model)
    states.enter(Progress(step=2, phase=2, since=2), x.reference)
    with states.reference(x.reference) as scored:
        assert torch.equal(forward_logprobs(scored, pack(IDS, MASK))[0], then)


def test_frozen_shares_no_memory_with_the_policy_and_takes_no_gradient(model):
    state = reference.frozen().init(model)
    policy = {p.data_ptr() for p in model.parameters()}
    assert not policy & {p.data_ptr() for p in state.parameters()}
    assert not any(p.requires_grad for p in state.parameters()) and all(
        p.requires_grad for p in model.parameters()
    )
    assert not state.training


@pytest.mark.parametrize("lora", [False, True])
def test_scoring_with_the_reference_builds_no_graph(model, lora):
    """With the adapter off no weight that it uses is trained, but hooks and shared heads may be:
    nothing is recorded at all."""
    policy = add_lora(model, LoRA(rank=2)) if lora else model
    kept = reference.frozen()
    with kept.model(kept.init(policy), policy):
        assert not torch.is_grad_enabled()
    assert not reference_scores(kept, kept.init(policy), policy).requires_grad
    assert torch.is_grad_enabled()


def test_under_lora_nothing_is_copied_and_the_base_is_scored(model):
    """The state is None: the reference is the policy with its adapter off, even after the adapter
    has been trained."""
    start = scores(model)
    policy = add_lora(model, LoRA(rank=2))
    kept = reference.frozen()
    state = kept.init(policy)
    assert state is None
    for _ in range(2):  # the first step only moves the half of an adapter that starts at 0
        train_one_step(policy)
    assert not torch.equal(scores(policy), start)
    assert torch.equal(
        reference_scores(kept, kept.update(state, policy, step=1, kl=None), policy), start
    )


def test_under_lora_the_adapter_is_on_again_afterwards(model):
    """Also where scoring fails: otherwise the rest of the run samples from the base."""
    policy = add_lora(model, LoRA(rank=2))
    for _ in range(2):
        train_one_step(policy)
    trained, kept = scores(policy), reference.frozen()
    reference_scores(kept, None, policy)
    assert torch.equal(scores(policy), trained)
    with pytest.raises(RuntimeError, match="out of memory"), kept.model(None, policy):
        raise RuntimeError("out of memory")
    assert torch.equal(scores(policy), trained) and torch.is_grad_enabled()


def test_none_keeps_nothing_and_refuses_to_score(model):
    nothing = reference.none()
    state = nothing.init(model)
    assert state is None and nothing.update(state, model, step=1, kl=None) is None
    with (
        pytest.raises(ValueError, match=r"reference.*none.*reference=frozen"),
        nothing.model(state, model),
    ):
        pass


@pytest.mark.parametrize("kept", [reference.none(), reference.frozen()], ids=lambda r: r.name)
def test_the_name_is_that_of_the_option(kept):
    """compose tells `reference=none` by its name."""
    assert (
        getattr(reference, kept.name)() == kept or kept.name == getattr(reference, kept.name)().name
    )


# ----------------------------------------------------------------------------- references that move

RULES = {"ema": {"decay": 0.9}, "periodic": {"every": 2}, "on_kl": {"threshold": 0.5}}
MOVING = [getattr(reference, name)(**settings) for name, settings in RULES.items()]
NAN = float("nan")

moving = pytest.mark.parametrize("kept", MOVING, ids=lambda r: r.name)
adapted = pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])


class Small(nn.Module):
    """Parameters, buffers that count and average, and one that no checkpoint of the model would
    hold."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2, dtype=dtype), nn.BatchNorm1d(2, dtype=dtype)
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def shake(self, seed):
        """Other numbers everywhere."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10)
        return self


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


def kept_weights(kept, state, model):
    """All that the reference scores with, parameters and buffers."""
    with kept.model(state, model) as scored:
        return flat([*scored.parameters(), *scored.buffers()])


def adapter(model, name):
    return {
        n.replace(f".{name}.", "."): p.detach().clone()
        for n, p in model.named_parameters()
        if f".{name}." in n
    }


def policy_of(model, lora):
    """The model, or the model with an adapter that is no longer 0."""
    if not lora:
        return model
    policy = add_lora(model, LoRA(rank=2))
    for _ in range(2):
        train_one_step(policy)
    return policy


def test_ema_is_the_average_that_a_loop_gives():
    """decay · reference + (1 - decay) · policy, number by number in float64; buffers are copied,
    also those that count."""
    policy, kept = Small().shake(0), reference.ema(decay=0.7)
    state, expected = kept.init(policy), [float(v) for v in flat(policy.parameters())]
    for step in range(1, 6):
        policy.shake(step)
        state = kept.update(state, policy, step=step, kl=NAN)
        expected = [
            0.7 * r + 0.3 * float(v)
            for r, v in zip(expected, flat(policy.parameters()), strict=True)
        ]
        torch.testing.assert_close(
            flat(state.model.parameters()),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-13,
            atol=1e-13,
        )
        assert torch.equal(flat(state.model.buffers()), flat(policy.buffers()))


def test_ema_of_a_bfloat16_policy_moves():
    """In bfloat16 itself 0.999 · 1 + 0.001 · 2 is 1, for ever; the average is kept in float32 and
    scored in bfloat16."""
    policy, kept = Small(torch.bfloat16), reference.ema(decay=0.999)
    nn.init.ones_(policy.linear.weight)
    state = kept.init(policy)
    nn.init.constant_(policy.linear.weight, 2.0)
    for step in range(1, 101):
        state = kept.update(state, policy, step=step, kl=NAN)
    wanted = torch.full((2, 3), 2 - 0.999**100)
    torch.testing.assert_close(state.weights["linear.weight"], wanted, rtol=1e-5, atol=0)
    assert state.model.linear.weight.dtype is torch.bfloat16 and torch.equal(
        state.model.linear.weight, wanted.bfloat16()
    )


def test_ema_without_memory_is_a_copy_after_every_step():
    """ema(decay=0) = periodic(every=1), bit for bit."""
    policy, kinds = Small().shake(0), (reference.ema(decay=0), reference.periodic(every=1))
    states = [kept.init(policy) for kept in kinds]
    for step in range(1, 4):
        policy.shake(step)
        states = [
            kept.update(state, policy, step=step, kl=NAN)
            for kept, state in zip(kinds, states, strict=True)
        ]
        first, second = (
            kept_weights(kept, state, policy) for kept, state in zip(kinds, states, strict=True)
        )
        assert torch.equal(first, second) and torch.equal(
            first, flat([*policy.parameters(), *policy.buffers()])
        )


@pytest.mark.parametrize("every", [1, 2, 3])
def test_periodic_copies_at_multiples_and_at_no_other_step(every):
    policy, kept = Small().shake(0), reference.periodic(every=every)
    state = kept.init(policy)
    for step in range(1, 8):
        before = kept_weights(kept, state, policy)
        state = kept.update(state, policy.shake(step), step=step, kl=1e9)
        after = kept_weights(kept, state, policy)
        wanted = flat([*policy.parameters(), *policy.buffers()]) if step % every == 0 else before
        assert torch.equal(after, wanted) and not torch.equal(
            before, flat([*policy.parameters(), *policy.buffers()])
        )


def test_on_kl_copies_when_the_sum_passes_the_threshold_and_starts_anew():
    """0.25 + 0.25 does not pass 0.5, the next step does; what is left over is not carried on, and
    nan adds nothing."""
    policy, kept = Small().shake(0), reference.on_kl(threshold=0.5)
    state, copied, sums = kept.init(policy), [], []
    for step, kl in enumerate(
        [0.25, NAN, 0.25, 0.125, 0.5, 0.25, float("inf"), -0.125, 2.0], start=1
    ):
        state = kept.update(state, policy.shake(step), step=step, kl=kl)
        copied.append(
            torch.equal(
                kept_weights(kept, state, policy), flat([*policy.parameters(), *policy.buffers()])
            )
        )
        sums.append(state.kl)
    assert copied == [False, False, False, True, False, True, False, False, True]
    assert sums == [0.25, 0.25, 0.5, 0.0, 0.5, 0.0, 0.0, -0.125, 0.0]


def test_on_kl_by_distance_copies_at_the_first_step_that_is_beyond_the_threshold():
    """A policy that stays 0.25 nats away is never copied, where the accumulated measure copies
    every third step; nan copies nothing."""
    kls = [0.25, 0.25, 0.25, NAN, 0.5, 0.75, 0.25, float("inf"), 0.625]
    copied = {}
    for measure in ("accumulated", "distance"):
        policy, kept = Small().shake(0), reference.on_kl(threshold=0.5, measure=measure)
        state = kept.init(policy)
        copied[measure] = []
        for step, kl in enumerate(kls, start=1):
            state = kept.update(state, policy.shake(step), step=step, kl=kl)
            if torch.equal(
                kept_weights(kept, state, policy), flat([*policy.parameters(), *policy.buffers()])
            ):
                copied[measure].append(step)
    assert copied == {"accumulated": [3, 6, 9], "distance": [6, 9]}


def test_on_kl_refuses_a_measure_that_it_does_not_know():
    with pytest.raises(ValueError, match=r"measure=total: must be accumulated or distance"):
        reference.on_kl(threshold=0.5, measure="total")


def factors(policy, name):
    """Module → (A, B) of an adapter, in float64. The effective weight is W + scale · B A, the scale
    alike everywhere."""
    found = adapter(policy, name)
    return {
        n.partition(".lora_A")[0]: (
            found[n].double(),
            found[n.replace("lora_A", "lora_B")].double(),
        )
        for n in found
        if "lora_A" in n
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "lr, decay, noise, least, most",
    cases(
        [
            (1e-2, 0.9, False, 0.10, 0.20),
            (1e-3, 0.9, False, 0.04, 0.06),
            (1e-2, 0.99, True, 0.4, 0.65),
        ],
        1,
        unpack=True,
    ),
)
def test_under_lora_ema_averages_the_factors_which_is_not_the_average_of_their_products(
    model, lr, decay, noise, least, most
):
    """B̄ Ā = Σ w B A - Σ w (B - B̄)(A - Ā), with Σ w = 1: what is left out is the covariance of the
    factors over the average's memory.

    Twenty steps of AdamW leave out 5 %, 13 % and, where gradients are noise and the memory is long,
    54 % of the averaged product's norm.
    """
    torch.manual_seed(0)  # the adapters' start: from other starts 13 % became 14 and 16
    policy, kept, generator = (
        add_lora(model, LoRA(rank=2)),
        reference.ema(decay=decay),
        torch.Generator().manual_seed(0),
    )
    state, seen, weights = kept.init(policy), [factors(policy, "default")], [1.0]
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=lr)
    for step in range(1, 21):
        optimizer.zero_grad()
        wanted = torch.randn(MASK.shape, generator=generator) if noise else -torch.ones(MASK.shape)
        (forward_logprobs(policy, pack(IDS, MASK))[0] * wanted).sum().backward()
        optimizer.step()
        state = kept.update(state, policy, step=step, kl=NAN)
        seen, weights = (
            [*seen, factors(policy, "default")],
            [decay * w for w in weights] + [1 - decay],
        )
    whole = left_out = 0.0
    for name, (a, b) in factors(policy, "reference").items():
        average = sum(w * s[name][1] @ s[name][0] for w, s in zip(weights, seen, strict=True))
        covariance = sum(
            w * (s[name][1] - b) @ (s[name][0] - a) for w, s in zip(weights, seen, strict=True)
        )
        torch.testing.assert_close(
            b @ a, average - covariance, rtol=1e-4, atol=1e-6
        )  # averaged in float32
        whole, left_out = (
            whole + float(average.square().sum()),
            left_out + float(covariance.square().sum()),
        )
    assert least < (left_out / whole) ** 0.5 < most


@pytest.mark.slow
@moving
@adapted
def test_a_moving_reference_starts_equal_to_the_policy(model, kept, lora):
    policy = policy_of(model, lora)
    assert torch.equal(reference_scores(kept, kept.init(policy), policy), scores(policy))


@moving
def test_under_lora_a_fresh_start_is_the_base(model, kept):
    """The second half of a fresh adapter is 0, so policy, reference and base are one."""
    start = scores(model)
    policy = add_lora(model, LoRA(rank=2))
    assert torch.equal(reference_scores(kept, kept.init(policy), policy), start)


@adapted
def test_ema_scores_between_its_start_and_the_policy(model, lora):
    """Moved with decay 0.5 the weights lie halfway, and scoring sees them."""
    policy, kept = policy_of(model, lora), reference.ema(decay=0.5)
    state = kept.init(policy)
    start = {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
    first = scores(policy)
    train_one_step(policy)
    state = kept.update(state, policy, step=1, kl=NAN)
    found = reference_scores(kept, state, policy)
    assert not torch.equal(found, first) and not torch.equal(found, scores(policy))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.requires_grad:
                p.copy_((start[name] + p) / 2)
    torch.testing.assert_close(found, scores(policy), rtol=1e-5, atol=1e-5)


@moving
def test_under_lora_no_weight_of_the_base_is_copied(model, kept):
    """The second adapter is all that is new, in float32 and without gradient; other random numbers
    are as they were."""
    policy = policy_of(model, lora=True)
    before, trained = (
        {p.data_ptr() for p in policy.parameters()},
        [p for p in policy.parameters() if p.requires_grad],
    )
    memory = sum(p.numel() for p in policy.parameters())
    random = torch.get_rng_state()
    state = kept.init(policy)
    assert torch.equal(torch.get_rng_state(), random)
    new = [p for p in policy.parameters() if p.data_ptr() not in before]
    assert (
        sum(p.numel() for p in policy.parameters()) - memory
        == sum(p.numel() for p in new)
        == sum(p.numel() for p in trained)
    )
    assert {t.data_ptr() for t in state.weights.values()} == {
        p.data_ptr() for p in new
    } and state.model is None
    assert not any(p.requires_grad for p in new) and all(p.dtype is torch.float32 for p in new)
    now = [p for p in policy.parameters() if p.requires_grad]
    assert len(now) == len(trained) and all(a is b for a, b in zip(now, trained, strict=True))


@pytest.mark.parametrize("gathered", [False, True])
def test_under_lora_the_reference_is_not_saved_with_the_policy(tiny, model, tmp_path, gathered):
    """Its adapter was written into the policy's folder."""
    adapted = add_lora(model, LoRA(rank=2))
    reference.ema(decay=0.5).init(adapted)
    state = adapted.state_dict() if gathered else None
    save_policy(tmp_path / "model", tiny._replace(model=adapted), state=state, tokenizer=False)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "adapter_model.safetensors" in names and reference.ADAPTER not in names


def test_under_lora_the_reference_of_a_bfloat16_base_is_float32(model):
    policy = add_lora(model.bfloat16(), LoRA(rank=2))
    state = reference.ema(decay=0.999).init(policy)
    assert all(t.dtype is torch.float32 for t in state.weights.values())
    assert all(p.dtype is torch.float32 for n, p in policy.named_parameters() if ".reference." in n)


@pytest.mark.slow
@moving
def test_under_lora_scoring_leaves_the_policy_as_it_was(model, kept):
    """Log-probs, active adapter, what is trained and training mode, also where scoring fails; and
    off still means the base."""
    base = scores(model)
    policy = policy_of(model, lora=True)
    frozen_half = [p for n, p in policy.named_parameters() if "lora_A" in n]
    for p in frozen_half:  # a choice that PEFT's own switch would undo
        p.requires_grad_(False)
    state = kept.init(policy)
    train_one_step(policy)
    trained, active = scores(policy), policy.active_adapter
    flags = {n: p.requires_grad for n, p in policy.named_parameters()}
    modes = {n: m.training for n, m in policy.named_modules()}

    def unchanged():
        return (
            torch.equal(scores(policy), trained)
            and policy.active_adapter == active
            and {n: p.requires_grad for n, p in policy.named_parameters()} == flags
            and {n: m.training for n, m in policy.named_modules()} == modes
            and torch.is_grad_enabled()
        )

    with kept.model(state, policy) as scored:
        assert {n: p.requires_grad for n, p in policy.named_parameters()} == flags
        assert not torch.equal(forward_logprobs(scored, pack(IDS, MASK))[0], trained)
    assert unchanged() and not all(flags[n] for n in flags if "lora_" in n)
    with pytest.raises(RuntimeError, match="out of memory"), kept.model(state, policy):
        raise RuntimeError("out of memory")
    assert unchanged()
    with policy.disable_adapter():
        assert torch.equal(scores(policy), base)


@pytest.mark.slow
@pytest.mark.parametrize("kept", cases(MOVING, 1), ids=lambda r: r.name)
def test_the_policy_is_trained_as_without_a_reference(model, kept):
    """A step with the second adapter in place moves the first one as it would alone, and the second
    one not at all."""
    alone, beside = policy_of(copy.deepcopy(model), lora=True), policy_of(model, lora=True)
    beside.load_state_dict(alone.state_dict())
    state = kept.init(beside)
    start = adapter(beside, "reference")
    for policy in (alone, beside):
        train_one_step(policy)
    with kept.model(state, beside):
        pass
    found, wanted = adapter(beside, "default"), adapter(alone, "default")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert all(torch.equal(t, start[n]) for n, t in adapter(beside, "reference").items())


@pytest.mark.slow
@pytest.mark.parametrize("kept, lora", cases(product(MOVING, [False, True]), 2, unpack=True))
def test_what_is_saved_continues_as_if_nothing_had_happened(model, kept, lora):
    """Through a file that torch reads with weights_only, into a state that was made anew from
    another policy."""
    policy = policy_of(model, lora)
    twin = copy.deepcopy(policy)
    state = kept.update(kept.init(policy), policy, step=1, kl=0.25)
    train_one_step(policy)
    state = kept.update(state, policy, step=2, kl=0.125)
    file = io.BytesIO()
    torch.save(kept.save(state), file)
    file.seek(0)
    train_one_step(twin)
    again = kept.load(kept.init(twin), twin, torch.load(file, weights_only=True))
    assert again.kl == state.kl and again.weights.keys() == state.weights.keys()
    assert all(torch.equal(again.weights[n], state.weights[n]) for n in state.weights)
    twin.load_state_dict(policy.state_dict(), strict=False)
    for step in (3, 4):
        for changed in (policy, twin):
            train_one_step(changed)
        state, again = (
            kept.update(s, p, step=step, kl=0.25) for s, p in ((state, policy), (again, twin))
        )
    assert torch.equal(reference_scores(kept, again, twin), reference_scores(kept, state, policy))


def test_what_a_bfloat16_policy_saved_is_scored_again(model):
    """The average comes back in float32, and the copy that scores follows it."""
    policy, kept = Small(torch.bfloat16).shake(0), reference.ema(decay=0.5)
    state = kept.update(kept.init(policy), policy.shake(1), step=1, kl=NAN)
    again = kept.load(kept.init(policy), policy, kept.save(state))
    assert torch.equal(kept_weights(kept, again, policy), kept_weights(kept, state, policy))


@pytest.mark.parametrize("kept", [reference.none(), reference.frozen()], ids=lambda r: r.name)
def test_what_never_moves_saves_nothing(model, kept):
    state = kept.init(model)
    assert kept.save(state) == {} and kept.load(state, model, {"weights": {}}) is state


@moving
def test_a_run_that_had_no_moving_reference_starts_one_at_its_start(kept):
    policy = Small()
    state = kept.init(policy)
    assert kept.load(state, policy, {}) is state


@moving
def test_a_checkpoint_of_another_model_is_refused(kept):
    policy = Small()
    saved = kept.save(kept.init(policy))
    del saved["weights"]["linear.bias"]
    with pytest.raises(ValueError, match=r"another model.*linear.bias"):
        kept.load(kept.init(policy), policy, saved)


@pytest.mark.parametrize(
    "make, settings",
    [
        *((reference.ema, {"decay": v}) for v in (-0.1, 1, 1.5, NAN)),
        *((reference.periodic, {"every": v}) for v in (0, -1)),
        *((reference.on_kl, {"threshold": v}) for v in (0, -0.5, NAN)),
    ],
)
def test_numbers_out_of_range_are_refused(make, settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=rf"{name}={value}: must be (at least|greater)"):
        make(**settings)


@moving
def test_the_name_of_a_moving_reference_is_that_of_its_option(kept):
    assert (
        kept.name in RULES and getattr(reference, kept.name)(**RULES[kept.name]).name == kept.name
    )
