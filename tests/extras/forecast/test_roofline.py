"""Seconds and bytes from sizes alone, against numbers worked out by hand and published ones."""

from __future__ import annotations

import pytest

from parametrise import each
from rlkit.extras.forecast import (
    CARDS,
    KNOWN,
    Load,
    compute_memory,
    decode_limit,
    decode_step,
    forecast,
    propose_changes,
    read_shape,
    settle_checkpointing,
)
from rlkit.models.load import pretrained_config
from rlkit.training.activations import MOST_COUNTED

SMALL, H200 = KNOWN["Qwen/Qwen3-0.6B"], CARDS["h200"]
STEP = Load(prompts=16, group=8, prompt=150, reply=300, longest=600, rank=16, checkpointing=True)


@each(
    # numbers of all weights, as the hub counts them; KiB of one token's keys and values in bfloat16
    "name, parameters, kib",
    [
        ("Qwen/Qwen3-0.6B", 596_049_920, 112),
        ("Qwen/Qwen3-1.7B", 1_720_574_976, 112),
        ("Qwen/Qwen3-4B", 4_022_468_096, 144),
        ("Qwen/Qwen3-8B", 8_190_735_360, 144),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 96),
    ],
)
def test_sizes_of_published_models(name, parameters, kib):
    assert (KNOWN[name].parameters, KNOWN[name].kv_bytes()) == (parameters, kib * 1024)


def test_the_sizes_of_a_config_are_those_of_its_weights(tiny):
    shape = read_shape(pretrained_config("tiny"))
    assert shape.parameters == sum(p.numel() for p in tiny.model.parameters())
    # A rank of 2 by hand, in each of 4 layers: q and o 128 + 128, k and v 128 + 64, and three
    # projections of 128 + 384.
    assert shape.adapters(2) == 4 * 2 * (2 * 256 + 2 * 192 + 3 * 512)


@each("rows, context, thousands", [(128, 512, 63), (256, 1024, 35), (256, 4096, 9)])
def test_the_bandwidth_limit_of_an_h200(rows, context, thousands):
    assert decode_limit(H200, SMALL, rows, context) / 1000 == pytest.approx(thousands, abs=0.5)


@each("rank", [0, 16])
@each("card", [name for name in CARDS if name != "cpu"])
def test_decoding_that_gathers_pages_reaches_a_fifth_of_the_bandwidth_limit(card, rank):
    """At 256 rows of 1k each; and noise of 270 bytes an entry would cost a hundredth of the
    limit."""
    step = decode_step(CARDS[card], SMALL, 256, 1024, rank)
    share = 256 / sum(step.values()) / decode_limit(CARDS[card], SMALL, 256, 1024)
    assert 0.2 <= share < 0.4
    much = step | {"noise": 256 * SMALL.vocab * 270 / CARDS[card].bandwidth}
    assert 256 / sum(much.values()) / decode_limit(CARDS[card], SMALL, 256, 1024) < share - 0.01


def test_the_noise_of_a_row_of_an_h200_by_hand():
    """256 rows × 151,936 entries × 24 bytes / 4.32 TB/s = 0.216 ms."""
    assert decode_step(H200, SMALL, 256, 1024)["noise"] == pytest.approx(2.16e-4, rel=0.01)


def test_memory_of_trained_weights_by_hand():
    """AdamW in float32: weights, gradients and two moments are 16 bytes a number, the frozen
    reference 4, the copy in bfloat16 2."""
    found, _ = compute_memory(H200, KNOWN["Qwen/Qwen3-4B"], STEP._replace(rank=0, copies=1))
    held = sum(
        found[name]
        for name in ("weights", "copy in bfloat16", "gradients", "optimizer", "reference")
    )
    assert held / KNOWN["Qwen/Qwen3-4B"].parameters == pytest.approx(22)


def test_adapters_of_8b_fit_24_gb_with_a_dozen_long_replies():
    """16.4 GB of base; half of the rest holds 12 to 16 replies of 1.3k tokens at 144 KiB each."""
    found, slots = compute_memory(
        CARDS["4090"], KNOWN["Qwen/Qwen3-8B"], STEP._replace(prompt=150, reply=1150, longest=1150)
    )
    assert 12 <= slots <= 16 and found["weights"] == pytest.approx(16.4e9, rel=0.02)


def test_a_step_of_an_h200():
    """16 × 8 replies of 300 tokens of 0.6 B: seconds, not minutes; today's engine is expected to
    need 4 to 8 s for decoding alone."""
    found = forecast(H200, SMALL, STEP)
    assert found.fits and found.slots == 128 and 1 < found.total < 5
    assert found.total == pytest.approx(sum(found.seconds.values()))


@each("change", [{"prompts": 32}, {"reply": 500}, {"turns": 2}, {"prompt": 1000}])
def test_more_work_takes_longer(change):
    assert forecast(H200, SMALL, STEP._replace(**change)).total > forecast(H200, SMALL, STEP).total


def test_advice_makes_a_run_fit_and_names_each_key_once():
    big = KNOWN["Qwen/Qwen3-8B"]
    load = STEP._replace(rank=0, copies=1, checkpointing=False)
    assert not forecast(CARDS["4090"], big, load).fits
    found = propose_changes(CARDS["4090"], big, load)
    keys = [words.partition("=")[0] for words, _ in found]
    assert found[-1][1].fits and "model.lora.rank" in keys and 1 <= len(keys) == len(set(keys)) <= 3


def test_auto_halves_micro_batches_before_it_recomputes():
    """On 80 GB adapters of 0.6B fit as they are, those of 4B in smaller micro-batches, all weights
    of 4B not at all."""
    card = CARDS["h100"]
    load = STEP._replace(checkpointing=True, micro_batch=16384)
    small, middle = (
        settle_checkpointing(card, KNOWN[f"Qwen/Qwen3-{name}"], load) for name in ("0.6B", "4B")
    )
    assert small == load._replace(checkpointing=False)
    assert not middle.checkpointing and MOST_COUNTED <= middle.micro_batch < 16384
    all_weights = load._replace(rank=0, copies=1)
    assert settle_checkpointing(card, KNOWN["Qwen/Qwen3-4B"], all_weights) == all_weights


def test_advice_on_a_run_that_fits_pays():
    now = forecast(H200, SMALL, STEP)
    (words, then), *_ = propose_changes(H200, SMALL, STEP)
    assert words == "batch.prompts=32" and then.fits and then.total / 2 < 0.95 * now.total
