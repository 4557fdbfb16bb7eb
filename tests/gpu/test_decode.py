"""Captured decoding steps on CUDA give the replies of the reference and of uncaptured steps.
Needs torch, transformers, peft.

On a machine without pytest-xdist: pytest -o addopts= -m gpu tests/gpu. In float32, where rounding
almost never changes a token.
"""

from __future__ import annotations

import pytest
import torch

from rlkit.engines import Cached
from rlkit.engines.cached import graphs
from rlkit.engines.cached.passes import Passes
from rlkit.functional import mix
from rlkit.models import LoRA, load_policy

pytestmark = pytest.mark.gpu
N = 24
SEEDS = [mix(3, i) for i in range(N)]
CONTEXTS = [
    tuple(100 + (7 * i * j) % 600 for j in range(1, 12 + 9 * (i // 4))) for i in range(0, N)
]  # of many lengths
CONTEXTS = [CONTEXTS[i - i % 4] for i in range(N)]  # and groups of four siblings


@pytest.fixture
def policy():
    """A new tiny model for each test: some change its weights."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return load_policy(path="tiny", device="cuda")


@pytest.fixture
def replays(monkeypatch):
    """Counts captures and replays; a capture that fails is a warning, and so an error here."""
    counts = {"captured": 0, "replayed": 0}
    capture = graphs.capture

    def counted(*given):
        replay = capture(*given)
        counts["captured"] += 1

        def again():
            counts["replayed"] += 1
            replay()

        return again

    monkeypatch.setattr(graphs, "capture", counted)
    return counts


def equal(ours, theirs) -> bool:
    """The same tokens; log-probs up to the rounding of other kernels in float32."""
    assert [(g.token_ids, g.finish_reason, g.forced) for g in ours] == [
        (g.token_ids, g.finish_reason, g.forced) for g in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
        )
    return True


@pytest.mark.parametrize("slots", [{}, {"max_rows": 5}, {"max_cached_tokens": 600}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 100},
        {"max_thinking_tokens": 3},
    ],
    ids=str,
)
def test_captured_replies_are_those_of_the_reference_and_of_the_uncaptured_step(
    policy, complete, reference, replays, settings, slots
):
    settings = {"max_new_tokens": 48} | settings
    found = complete(Cached(**slots), policy, CONTEXTS, SEEDS, **settings)
    assert 0 < replays["captured"] < replays["replayed"]
    assert equal(
        found,
        complete(
            Cached(**slots, cuda_graphs=False, check_every=1), policy, CONTEXTS, SEEDS, **settings
        ),
    )
    assert equal(found, reference(policy, CONTEXTS, SEEDS, **settings))


def test_captured_turns(policy, complete, replays):
    """Five turns of contexts that grow."""
    found = []
    for captured in (True, False):
        held, turns, seen = dict(enumerate(CONTEXTS)), dict.fromkeys(range(N), 0), {}

        def go_on(index, reply, held=held, turns=turns, seen=seen):
            seen.setdefault(index, []).append(reply)
            turns[index] += 1
            held[index] = held[index] + reply.token_ids + tuple(range(200, 230 + index))
            return None if turns[index] == 5 else (held[index], mix(index, turns[index]))

        complete(Cached(cuda_graphs=captured), policy, CONTEXTS, SEEDS, go_on, max_new_tokens=16)
        found.append([reply for _, replies in sorted(seen.items()) for reply in replies])
    assert equal(*found) and replays["captured"] > 2


def test_adapters_and_weights_that_change_between_loads(policy, complete, reference, replays):
    """LoRA, then its weights in place, as an optimizer changes them, then other memory under the
    same names."""
    policy = load_policy(path="tiny", lora=LoRA(rank=4), dtype="float32", device="cuda")
    seen = []
    for change in (
        lambda w: w.data.fill_(0.05),
        lambda w: w.data.mul_(-2.0),
        lambda w: setattr(w, "data", w.data * 0.5),
    ):
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                change(weight)
        seen.append(complete(Cached(), policy, CONTEXTS, SEEDS, max_new_tokens=32))
        assert equal(seen[-1], reference(policy, CONTEXTS, SEEDS, max_new_tokens=32))
    assert seen[0] != seen[1] != seen[2] and replays["replayed"] > 3


@pytest.mark.parametrize("precision", [torch.bfloat16, None])
def test_half_precision_scores_what_it_samples(policy, complete, replays, precision):
    """bfloat16 weights, or autocast over float32 ones: log-probs of the tokens that were drawn,
    against one full forward."""
    from contextlib import nullcontext

    from rlkit.models import forward_logprobs, pack

    model = policy.model.to(precision) if precision else policy.model
    with nullcontext() if precision else torch.autocast("cuda", torch.bfloat16):
        replies = complete(
            Cached(), policy._replace(model=model), CONTEXTS, SEEDS, max_new_tokens=32
        )
        gaps = []
        for context, reply in zip(CONTEXTS, replies, strict=True):
            ids = torch.tensor([[*context, *reply.token_ids]], device="cuda")
            mask = (torch.arange(ids.shape[1], device="cuda") >= len(context))[None]
            with torch.no_grad():
                gaps.append(
                    (
                        forward_logprobs(model, pack(ids, mask))[0][mask].cpu()
                        - torch.tensor(reply.logprobs)
                    ).abs()
                )
    assert (
        replays["replayed"] > 3 and float(torch.cat(gaps).mean()) < 0.05
    )  # the bound of the start-up check


def asks_the_host(monkeypatch):
    """Let the forward pass of a decoding step read a tensor on the host."""
    hidden = Passes.hidden
    monkeypatch.setattr(
        Passes, "hidden", lambda self, ids, *rest: (bool(ids.any()), hidden(self, ids, *rest))[1]
    )


def test_a_model_that_asks_the_host_decodes_without(
    policy, complete, reference, replays, monkeypatch
):
    """One warning, the same replies, and CUDA still works: other models are captured."""
    expected = reference(policy, CONTEXTS, SEEDS, max_new_tokens=16)
    with monkeypatch.context() as patch:
        asks_the_host(patch)
        with pytest.warns(UserWarning, match="cannot be captured") as caught:
            assert equal(complete(Cached(), policy, CONTEXTS, SEEDS, max_new_tokens=16), expected)
        assert equal(complete(Cached(), policy, CONTEXTS, SEEDS, max_new_tokens=16), expected)
        assert len(caught) == 1
    assert replays["captured"] == 0
    other = load_policy(path="tiny", device="cuda")
    assert equal(complete(Cached(), other, CONTEXTS, SEEDS, max_new_tokens=16), expected)
    assert replays["replayed"] > 3


def test_a_capture_that_breaks_off_leaves_cuda_in_order(
    policy, complete, reference, replays, monkeypatch
):
    """The host reads a tensor only during the capture. Stream, memory and replies stay intact."""
    from contextlib import nullcontext

    expected = reference(policy, CONTEXTS, SEEDS, max_new_tokens=16)
    stream = torch.cuda.current_stream()
    monkeypatch.setattr(graphs, "refuse_host_waits", lambda device: nullcontext())
    asks_the_host(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert equal(complete(Cached(), policy, CONTEXTS, SEEDS, max_new_tokens=16), expected)
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_pages_read_in_place_give_the_replies_of_pages_that_are_gathered(policy, complete):
    """`generation.cache=varlen` in bfloat16: greedy replies agree in nearly all tokens, since the
    two kernels round sums differently."""
    from rlkit.engines.cached.attention import explain_no_reading_in_place

    if explain_no_reading_in_place():
        pytest.skip(explain_no_reading_in_place())
    policy.model.to(torch.bfloat16)
    settings = {"max_new_tokens": 16, "temperature": 0.0}
    gathered, in_place = (
        complete(Cached(cache=kind), policy, CONTEXTS, SEEDS, **settings)
        for kind in ("gather", "varlen")
    )
    same = [a.token_ids[0] == b.token_ids[0] for a, b in zip(gathered, in_place, strict=True)]
    gaps = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(gathered, in_place, strict=True)]
    assert sum(same) >= 0.9 * N and sum(gaps) / N < 0.05
