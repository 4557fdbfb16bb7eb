"""Whether updates recompute their activations is measured on a few tokens, decided by a rule over
bytes, and kept by a run whatever machine it goes on with."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
from dataclasses import replace

import pytest
import torch

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.commands.show import with_decision
from rlkit.config.compose import compose, experiment
from rlkit.config.origins import Value
from rlkit.config.problems.rows import load_tasks
from rlkit.distributed import ranks
from rlkit.engines.cached.cache import compute_cache_bytes
from rlkit.models import LoRA, fused, load_policy, make_critic, pack
from rlkit.models.checkpointing import checkpoint_activations, is_checkpointed
from rlkit.models.log_probs import compute_states
from rlkit.training import activations
from rlkit.training.activations import (
    USABLE,
    Decision,
    Needs,
    activations_line,
    decide,
    fits,
    keep_activations,
    measure_activations,
    saved_bytes,
    settle_activations,
)

GIB = 1 << 30
CPU = torch.device("cpu")
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "batch.prompts=2",
    "batch.group_size=4",
    "evaluation.n=0",
    "logger=none",
    "generation.max_new_tokens=32",
    "task.max_samples=32",
]
COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)


@pytest.fixture
def machine(monkeypatch):
    """A function that gives the machine another memory."""

    def total(size: int) -> None:
        monkeypatch.setattr(activations, "total_memory", lambda device: size)

    return total


# --------------------------------------------------------------------------------------- the rule

CARD = 80 * GIB
WHOLE = Needs(weights=10 * GIB, training=12 * GIB, activations=0, logits=GIB)


@pytest.mark.parametrize(
    "needs, cache, total, expected",
    [
        (WHOLE, 0, CARD, True),
        (WHOLE._replace(activations=48 * GIB), 0, CARD, True),  # 23 + 48 + 1 = 0.9 · 80
        (WHOLE._replace(activations=48 * GIB + 1), 0, CARD, False),
        (WHOLE._replace(activations=24 * GIB), compute_cache_bytes(10 * GIB, CARD), CARD, False),
        (WHOLE._replace(activations=23 * GIB), compute_cache_bytes(10 * GIB, CARD), CARD, True),
        (WHOLE, compute_cache_bytes(10 * GIB, 24 * GIB), 24 * GIB, False),  # not even without any
        (Needs(0, 0, 0, 0), 0, GIB, False),  # the libraries alone
    ],
)
def test_an_update_fits_where_all_it_holds_is_within_the_usable_memory(
    needs, cache, total, expected
):
    assert fits(needs, cache, total) is expected


def test_the_cache_has_a_share_of_what_the_weights_leave():
    assert compute_cache_bytes(10 * GIB, CARD) == int(0.35 * 70 * GIB)
    assert compute_cache_bytes(90 * GIB, CARD) == 0


# --------------------------------------------------------------------------------- the measurement


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def held_bytes() -> int:
    """Bytes of all blocks that the process has taken from glibc and not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    found = mallinfo()
    return found.uordblks + found.hblkhd


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(
    "settings, rows, width",
    cases(
        [
            ({"kernel": "eager"}, 20, 200),
            ({"kernel": "eager"}, 2, 400),  # longer than what is measured
            ({"kernel": "eager", "lora": LoRA(rank=4)}, 20, 200),
            ({"kernel": "eager", "attention": "eager"}, 4, 400),  # grows with the square
            ({"kernel": "auto"}, 20, 200),
        ],
        5,
        unpack=True,
    ),
)
def test_a_few_tokens_say_what_a_micro_batch_keeps(settings, rows, width):
    """Against the heap after a forward pass of the whole micro-batch. 5 %: index tensors of the
    packed rows and headers of blocks, which grow with the rows too, are no saved activations (2.5 %
    at most of this model, whose states are narrow)."""
    model = load_policy(path="tiny", **settings).model
    expected = measure_activations(model, rows, width)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(width + 1) + 7 * torch.arange(rows)[:, None]) % vocabulary
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    packed = pack(ids, mask)
    assert len(packed.ids) == rows * width  # no beginning is shared
    gc.collect()
    before = held_bytes()
    kept = compute_states(model, packed)
    assert held_bytes() - before == pytest.approx(expected, rel=0.05)
    del kept


def test_a_storage_counts_once_and_weights_do_not_count():
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8)

    def run():
        y = x @ weight  # keeps x and the weight
        return (y * y[:, :]).sum()  # keeps y twice

    assert saved_bytes(run, [weight]) == 4 * (4 * 8 + 4 * 8)


@pytest.mark.slow
def test_terms_are_those_that_a_check_counts_by_hand(machine):
    """Weights, gradients, moments, a reference and a separate critic of the embedded model."""
    machine(16 * GIB)
    policy = load_policy(path="tiny")
    size = sum(p.nbytes for p in policy.model.parameters())

    def needs(*words, own=policy):
        x = experiment(compose([*SMALL, *words]))
        return decide(x, own, load_tasks(x).train, CPU).needs

    plain = needs("kl=none", "reference=none")
    assert plain[:2] == (size, 3 * size)
    assert needs().weights == 2 * size  # the reference
    for name, held in (("start", 1), ("ema", 1), ("context", 0)):
        taught = needs("algorithm=opd", f"teacher={name}", "kl=none", "reference=none")
        assert taught.weights == (1 + held) * size
    ppo = ["algorithm=ppo", "kl=none", "reference=none"]
    head = needs(*ppo, "algorithm.critic.model=head")
    both = needs(*ppo, "algorithm.critic.model=separate")
    # a critic's value head is small, and its tied head is trained too
    assert both.weights == pytest.approx(2 * size, rel=0.02)
    assert both.training == pytest.approx(6 * size, rel=0.02)
    assert both.activations == 2 * head.activations
    adapted = load_policy(path="tiny", lora=LoRA(rank=1))
    trained = sum(p.nbytes for p in adapted.model.parameters() if p.requires_grad)
    own = needs("model.lora.rank=1", own=adapted)
    assert own[:2] == (
        size + 2 * trained,
        3 * trained,
    )  # with a reference, at most a second adapter


@pytest.mark.slow
def test_shards_of_a_model_are_parts_of_it(machine, monkeypatch):
    machine(16 * GIB)
    policy = load_policy(path="tiny")
    x = experiment(compose([*SMALL, "trainer=fsdp", "trainer.devices=2"]))
    tasks = load_tasks(x).train
    alone = decide(x, policy, tasks, CPU)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    both = decide(x, policy, tasks, CPU)
    assert both.tokens == alone.tokens // 2
    assert both.needs.weights == alone.needs.weights // 2
    assert both.needs.training == alone.needs.training // 2


# ----------------------------------------------------------------------------------- the decision


@pytest.mark.slow
@pytest.mark.parametrize(
    "total, expected", [(16 * GIB, False), (int(1.2 * GIB), True), (GIB, True)]
)
def test_the_machine_decides_and_the_line_has_the_figures(total, expected, machine):
    machine(total)
    policy = load_policy(path="tiny", gradient_checkpointing="auto")
    assert not is_checkpointed(policy.model)
    x = experiment(compose(SMALL))
    line = settle_activations(x, policy, load_tasks(x).train, CPU)
    assert is_checkpointed(policy.model) is expected
    assert line.startswith(f"activations: {'recomputed' if expected else 'kept'} (one micro-batch")
    assert f"the limit is {USABLE * total / GIB:.2f} GiB, 90% of the memory)" in line
    assert policy.model.training


@pytest.mark.slow
def test_the_measurement_takes_no_draw_from_a_run(machine, monkeypatch):
    """An environment may draw when its first prompts are asked for."""
    machine(16 * GIB)
    measured = activations.longest_lengths

    def drawing(*parts):
        torch.rand(3)
        return measured(*parts)

    monkeypatch.setattr(activations, "longest_lengths", drawing)
    x = experiment(compose(SMALL))
    before = torch.get_rng_state()
    settle_activations(x, load_policy(path="tiny"), load_tasks(x).train, CPU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_a_value_of_the_config_is_taken_without_a_word(machine):
    machine(GIB)
    for value in (True, False):
        policy = load_policy(path="tiny", gradient_checkpointing=value)
        x = experiment(compose([*SMALL, f"model.gradient_checkpointing={str(value).lower()}"]))
        assert settle_activations(x, policy, [], CPU) == ""
        assert is_checkpointed(policy.model) is value


@pytest.mark.slow
def test_ranks_take_the_decision_of_the_first(machine, monkeypatch):
    """This rank's machine would keep them."""
    machine(16 * GIB)
    first = Decision(True, Needs(1, 1, 1, 1), 1, 10, GIB)
    monkeypatch.setattr(ranks, "broadcast", lambda make: first)
    policy = load_policy(path="tiny")
    x = experiment(compose(SMALL))
    line = settle_activations(x, policy, load_tasks(x).train, CPU)
    assert is_checkpointed(policy.model) and line == activations_line(first)


@pytest.mark.slow
@COMPILER
def test_a_fused_kernel_that_was_asked_for_wins_and_the_line_names_both_keys(machine):
    machine(GIB)
    policy = load_policy(path="tiny", kernel="fused", gradient_checkpointing="auto")
    x = experiment(compose([*SMALL, "model.kernel=fused"]))
    line = settle_activations(x, policy, load_tasks(x).train, CPU)
    assert not is_checkpointed(policy.model) and fused.update_kernel(policy.model) == "fused"
    assert "do not fit" in line
    assert "model.kernel=auto" in line and "model.gradient_checkpointing=auto" in line


@pytest.mark.slow
@COMPILER
@pytest.mark.parametrize("rank", [0, 2])
def test_switched_on_and_off_again_the_model_computes_as_before(rank):
    """The fused kernel comes back, no hook stays, and recomputation repeats the same operations."""
    model = load_policy(path="tiny", lora=LoRA(rank=rank)).model
    ids = torch.arange(12)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    hooks = len(model.get_input_embeddings()._forward_hooks)

    def gradients():
        model.zero_grad()
        compute_states(model, pack(ids, mask)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    first = gradients()
    checkpoint_activations(model, True)
    assert is_checkpointed(model) and fused.update_kernel(model) == "eager"
    # one would rule out the fused decoder here, and not in the process of asynchrony=overlap
    assert len(model.get_input_embeddings()._forward_hooks) == hooks == 0
    again = gradients()
    assert all(g is not None for g in again)
    for a, b in zip(first, again, strict=True):  # fused and eager round differently
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
    checkpoint_activations(model, False)
    assert not is_checkpointed(model) and fused.update_kernel(model) == "fused"
    assert len(model.get_input_embeddings()._forward_hooks) == hooks
    assert all(map(torch.equal, first, gradients()))


# ----------------------------------------------------------------------------------- kept and told


def test_a_checkpoint_decides_for_policy_and_critic(machine):
    policy = load_policy(path="tiny", gradient_checkpointing="auto")
    critic = make_critic(policy.model, model="separate")
    x = experiment(compose(SMALL))
    said = keep_activations(x, policy.model, critic, True)
    assert said == (
        "activations are recomputed, as the run did so far (model.gradient_checkpointing)"
    )
    assert is_checkpointed(policy.model) and is_checkpointed(critic.model)
    assert keep_activations(x, policy.model, critic, True) == ""
    assert "kept" in keep_activations(x, policy.model, critic, False)
    assert not is_checkpointed(policy.model) and not is_checkpointed(critic.model)
    x = x._replace(model=replace(x.model, gradient_checkpointing=False))
    assert keep_activations(x, policy.model, critic, True) == ""
    assert not is_checkpointed(policy.model)


def noted(folder):
    return [s["gradient_checkpointing"] for s in json.loads((folder / "run.json").read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("began, goes_on", [(GIB, 16 * GIB), (16 * GIB, GIB)])
def test_a_run_keeps_its_decision_on_a_machine_with_other_memory(
    began, goes_on, tmp_path, machine, capsys
):
    """Killed after two steps and resumed elsewhere: the weights of the run that was never moved."""
    words = [
        "debug=fast",
        *SMALL,
        "callbacks.checkpoint.every=1",
        "schedule.numbers.optimizer.lr.steps=9",
    ]
    folders = [tmp_path / name for name in ("whole", "moved")]
    machine(began)
    for folder, steps in zip(folders, (4, 2), strict=True):
        assert main(["train", *words, f"trainer.steps={steps}", f"hydra.run.dir={folder}"]) == 0
    (folders[1] / "summary.json").unlink()
    machine(goes_on)
    capsys.readouterr()
    assert main(["train", f"resume={folders[1]}", "trainer.steps=4"]) == 0
    word = "recomputed" if began == GIB else "kept"
    assert f"resume: activations are {word}, as the run did so far" in capsys.readouterr().out
    assert noted(folders[1]) == [began == GIB] * 2
    summary = json.loads((folders[1] / "summary.json").read_text())
    assert summary["gradient_checkpointing"] is (began == GIB)
    weights = [
        torch.load(folder / "checkpoints" / "step_000004.ckpt", weights_only=True)["state_dict"]
        for folder in folders
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert main(["show", f"run={folders[1]}"]) == 0
    said = "auto (true in this run)" if began == GIB else "auto (false in this run)"
    assert said in capsys.readouterr().out


def test_show_tells_what_a_run_decided():
    auto = Value("model.gradient_checkpointing", "auto", "default", False)
    assert with_decision([auto], {"gradient_checkpointing": True})[0].value == (
        "auto (true in this run)"
    )
    assert with_decision([auto], {}) == [auto]
    given = auto._replace(value=False)
    assert with_decision([given], {"gradient_checkpointing": False}) == [given]
