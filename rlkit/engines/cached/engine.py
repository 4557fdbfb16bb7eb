"""Define the cached engine, a service with options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rlkit.engines.cached.attention import (
    choose_attention_kernels,
    explain_no_reading_in_place,
    find_longest_context,
    use_grouped_attention,
)
from rlkit.engines.cached.cache import choose_cache_tokens
from rlkit.engines.cached.kernel import compile_kernel
from rlkit.engines.cached.scheduler import Scheduler
from rlkit.engines.cached.windows import Windowed
from rlkit.engines.service import Decoder, Service
from rlkit.engines.transformers import Transformers, use_sampling_mode
from rlkit.errors import EngineError
from rlkit.models.compiled import NoKernel
from rlkit.system.adapters import base_model
from rlkit.types import Policy


class Cached(Service):
    """Decode with continuous batching over a cache of keys and values. An episode keeps its cached
    keys and values from turn to turn.

    Tokens are sampled as in the reference engine (rlkit.engines.transformers.draw). Each token
    depends on the seed of its completion and on the token's position. The slot of a completion and
    the completions in other slots change only the last bits of the arithmetic.

    If some layers see only a window of the context, the reference engine decodes every completion
    that could outgrow the window. The reference engine also decodes every completion of a model
    with layers other than full or windowed attention, for example linear attention.

    Args:
      max_rows: the most completions sampled at once, > 0.
      max_cached_tokens: size of the cache in tokens, > 0. The engine limits it to at least one and
        at most `max_rows` contexts of full length. None: as many tokens as fit into 0.35 of the
        memory that the weights leave on the GPU or, on a CPU, in the machine or container. A CPU
        allocates this memory only as it is used. A prompt waits if it does not fit. If no page is
        left for the completions that are being sampled, episodes that wait for their environment
        lose their pages first. Next, the completion with the fewest sampled tokens loses its pages.
        This completion keeps its tokens, and the model reads its context again later.
      check_every: the host checks for ended completions each time that this number of tokens has
        been sampled in every slot, > 0. None: 1 on a CPU, 8 on other devices. The number changes no
        completion, because sampling in a slot stops when its completion ends.
      keep_cache: True keeps the memory of the cache, and the CUDA graphs, between calls. False
        frees the memory after each call; the next call allocates the cache and captures the graphs
        again.
      cuda_graphs: True runs the decoding step as CUDA graphs. If False, or if the model cannot be
        captured, the GPU kernels of a step are started one by one.
      kernel: how a decoding step is computed on a CPU. "fused": as one call of compiled C
        (kernel.py). "eager": as calls of torch. "auto": fused if possible, else eager. The choice
        changes the last bits of log-probs.
      cache: how a decoding step on CUDA reads the pages. "gather": it copies them for torch's
        attention. "varlen": `varlen_attn` reads them in place (torch 2.12, 16-bit weights); this
        has not been tried on a GPU yet. A CPU always gathers.
    Raises: ValueError for arguments out of range. EngineError if `kernel` is "fused" and the model
    or the machine does not allow it, or if `cache` is "varlen" and this version of torch cannot
    read pages in place.
    """

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_cached_tokens: int | None = None,
        check_every: int | None = None,
        cuda_graphs: bool = True,
        keep_cache: bool = True,
        kernel: Literal["auto", "eager", "fused"] = "auto",
        cache: Literal["gather", "varlen"] = "gather",
    ):
        super().__init__()
        numbers = max_rows, max_cached_tokens, check_every
        if any(number is not None and number < 1 for number in numbers):
            raise ValueError(
                "generation.engine: max_rows, max_cached_tokens and check_every must be >= 1 "
                f"(are {max_rows}, {max_cached_tokens}, {check_every})"
            )
        if cache not in ("gather", "varlen"):
            raise ValueError(f"generation.cache must be gather or varlen (is {cache!r})")
        self.max_rows = max_rows
        self.max_cached_tokens = max_cached_tokens
        self.cached_tokens: int | None = None
        self.cache = cache
        self.keep_cache = keep_cache
        self.kernel = kernel
        self.automatic = kernel == "auto"
        self.reason = ""  # the reason why the engine has settled on eager, if it has
        # with asynchrony=overlap: the kernel used by the separate sampling process
        self.elsewhere: Literal["eager", "fused"] | None = None
        # threads of a fused step (None: as many as torch uses); any number gives the same bits
        self.threads: int | None = None
        self.context_length = 0  # context length of the policy that the decoder was made for
        self.settings = {
            "max_rows": max_rows,
            "check_every": check_every,
            "cuda_graphs": cuda_graphs,
        }

    def make_decoder(self, policy: Policy) -> Decoder:
        model: Any = policy.model
        causal = base_model(model)
        # a model that computes attention by itself does not read the cache's masks
        replaceable = getattr(causal, "_supports_attention_backend", True)
        longest = find_longest_context(causal.config) if replaceable else 0
        context = int(min(policy.context_length, longest))
        if not context:
            why = "the engine's cache does not fit the model's attention"
            if self.kernel == "fused":
                raise EngineError(f"generation.kernel=fused: {why}; use auto or eager")
            self.reason = why
            return Transformers(max_rows=self.max_rows).make_decoder(policy)
        before = self.decoder
        kernel = self.kernel
        # Earlier in the run, `auto` became fused. A model without support in the kernel may still
        # decode eagerly, but a missing compiler is now an error.
        if self.automatic and kernel == "fused":
            try:
                compile_kernel()
            except NoKernel as error:
                raise NoKernel(
                    "generation.kernel: the run decodes with compiled code, which is impossible"
                    f" here: {error}"
                ) from None
            kernel = "auto"
        if (
            isinstance(before, Scheduler)
            and before.asked == kernel
            and before.tokens == self.cached_tokens
            and policy.context_length == self.context_length
            and before.passes.serves(policy._replace(context_length=context), causal)
        ):
            return before
        self.context_length = policy.context_length
        device = causal.device
        if self.cached_tokens is None:
            tokens = self.max_cached_tokens or choose_cache_tokens(causal, device)
            self.cached_tokens = min(tokens, self.max_rows * context)
        in_place = self.cache == "varlen" and device.type == "cuda"
        if in_place and (why := explain_no_reading_in_place(causal)):
            raise EngineError(f"generation.cache=varlen: {why}; use gather")
        settings: Any = self.settings | {
            "tokens": self.cached_tokens,
            "kernel": kernel,
            "in_place": in_place,
        }
        decoder = (
            Windowed(policy, causal, window=context, **settings)
            if context < policy.context_length
            else Scheduler(policy, causal, **settings)
        )
        self.reason = self.reason if kernel == "eager" else ""
        if decoder.kernel is not None:
            decoder.kernel.threads = self.threads
        if isinstance(before, Scheduler):
            decoder.graphs.captured = before.graphs.captured  # the count covers the engine's life
            before.clear()
        return decoder

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the engine. `captured_shapes` is the number of CUDA graphs captured
        since the engine was made."""
        captured = self.decoder.graphs.captured if isinstance(self.decoder, Scheduler) else 0
        return {**super().metrics(), "captured_shapes": captured}

    def keep_cached_tokens(self, tokens: int) -> None:
        """Use this cache size, in tokens, unless the config sets a size. The given size comes from
        a resumed run, or from the process that samples for this process."""
        if self.max_cached_tokens is None:
            self.cached_tokens = tokens

    @property
    def why_eager(self) -> str:
        """Return the reason why decoding is eager. Return "" if it is fused, or if the config names
        eager."""
        return self.reason or getattr(self.decoder, "why_eager", "")

    @property
    def decodes(self) -> Literal["eager", "fused"] | None:
        """Return the kernel in use. If this engine has loaded no weights yet, return the kernel
        used by the run's sampling process, or None if no process has sampled yet."""
        if self.decoder is None:
            return self.elsewhere
        fused = isinstance(self.decoder, Scheduler) and self.decoder.fused
        return "fused" if fused else "eager"

    def settle(self, kernel: Literal["eager", "fused"], why_eager: str = "") -> None:
        """Use this kernel from now on if the config asks for "auto". The trainer sends the same
        choice to the run's sampling process."""
        if not self.automatic:
            return
        self.kernel = kernel
        self.reason = why_eager
        own = self.decoder
        if isinstance(own, Scheduler) and kernel == "eager" and own.kernel is None:
            own.asked = kernel  # so `make_decoder` need not build the decoder again

    def go_on_with(self, kernel: Literal["eager", "fused"]) -> str:
        """Prepare the engine to continue a run that decoded with this kernel. If the run's kernel
        was "eager", "auto" now means "eager".

        Returns: a sentence for the run's output if decoding will differ from the run so far.
          Otherwise an empty string.
        """
        if self.automatic and kernel == "eager":
            self.settle(kernel, "as the run did so far")
        try:
            fused = self.kernel != "eager" and bool(compile_kernel())
        except EngineError:
            fused = False
        if fused == (kernel == "fused"):
            return ""
        now = "fused" if fused else "eager"
        return (
            f"decoding steps were {kernel} and are {now} (generation.kernel), so log-probs differ"
            " in their last bits"
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Return a context manager that prepares the model for sampling. At its end, the cache and
        the graphs stay in memory for the next call, unless `keep_cache` is False."""
        decoder = self.decoder
        if not isinstance(decoder, Scheduler):
            yield
            return
        causal = decoder.causal
        try:
            with (
                use_sampling_mode(causal),
                use_grouped_attention(causal.config),
                choose_attention_kernels(causal.device),
            ):
                yield
        except BaseException:
            decoder.clear()
            raise
        decoder.forget_episodes()
        if decoder.passes.casts:
            decoder.graphs.forget()
        if not self.keep_cache:
            decoder.clear()
