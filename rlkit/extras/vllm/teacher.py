"""A teacher behind `vllm serve`. The server gives, over HTTP, the teacher's log-probs of the
sampled tokens and of its own likeliest tokens.

    rows of ids ──▶ /v1/completions, prompt_logprobs=k ──▶ k + 1 named tokens at each position ──▶
    logits [m, V]

The named tokens are the tokens with a log-prob from the server. All other tokens share the rest of
the probability evenly, so the logits are a distribution. A divergence that reads only named tokens
is exact. All other divergences are refused before a model is loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlkit.errors import ConfigError, EngineError, name_function
from rlkit.extras.vllm.server import Lost, Server
from rlkit.functional import sampled_divergence, top_k_divergence
from rlkit.models.load import pretrained_tokenizer
from rlkit.system.adapters import base_model
from rlkit.system.loops import run, run_together
from rlkit.training.teachers import Teacher
from rlkit.types import Reference, reaches, safe

if TYPE_CHECKING:
    from rlkit.training.experiment import Experiment

TINY = 1e-12  # the least probability shared by the tokens without a log-prob from the server


def count_named_tokens(loss: Any) -> int | None:
    """Return the number of the teacher's likeliest tokens that a divergence reads beside the
    sampled token. Return None if the divergence reads the whole distribution."""
    function, given = loss, {}
    if isinstance(loss, functools.partial):
        function, given = loss.func, loss.keywords
    if function is top_k_divergence and given.get("chosen_by") == "teacher":
        return int(given.get("k", 32))
    return 0 if function is sampled_divergence else None


class ServedTeachers(Teacher):
    """Teachers behind servers. They refuse every setting that servers cannot serve."""

    def problems(self, experiment: Experiment) -> list[str]:
        """Refuse divergences of whole distributions, and temperatures other than 1. A server gives
        only the log-probs of single tokens at temperature 1."""
        loss = experiment.algorithm.streams["teacher"].loss
        temperature = experiment.generation.temperature
        problems = []
        if loss is not None and count_named_tokens(loss) is None:
            problems.append(
                f"algorithm.streams.teacher.loss={name_function(loss)}: it compares whole"
                " distributions,"
                " and teacher=vllm names only the sampled token and the teacher's likeliest ones;"
                " choose rlkit.functional.sampled_divergence (algorithm=opd),"
                " rlkit.functional.top_k_divergence with chosen_by: teacher, or teacher=path"
            )
        if temperature not in (0, 1):
            problems.append(
                f"generation.temperature={temperature}: teacher=vllm gives log-probs at"
                " temperature 1; set it to 1, or choose teacher=path"
            )
        return problems


@reaches(addresses="address", parts="address")
@safe("model")
def vllm_teacher(
    *,
    addresses: Sequence[str] = (),
    parts: Mapping[str, str | Sequence[str]] | None = None,
    model: str | None = None,
    max_rows: int = 64,
) -> Teacher:
    """Use other models with the policy's vocabulary as teachers, behind `vllm serve`. No part of
    them is loaded in this process.

    A server gives the log-probs of single tokens, at temperature 1. So the divergence must be
    `sampled_divergence`, or `top_k_divergence` with chosen_by=teacher, and generation.temperature
    must be 1. Log-probs are normalised over all rows of the served model's vocabulary.

    Args:
      addresses: URLs of the servers. Rows are assigned to them in turn. If a server no longer
        answers, the next server gets its rows.
      parts: for each part of a mixture, the addresses, or one address, of its own teacher's
        servers. `addresses` is then empty.
      model: the model's name on the servers, checked at the start. None accepts any model.
      max_rows: the most requests at once to each server, > 0.
    Raises: ValueError if an address is missing or invalid.
    """
    given = {
        part: [own] if isinstance(own, str) else list(own)
        for part, own in (parts or {"": addresses}).items()
    }
    fine = all(
        own and all(address.startswith(("http://", "https://")) for address in own)
        for own in given.values()
    )
    if max_rows < 1 or not fine or (parts and addresses):
        raise ValueError(
            f"addresses={list(addresses)}, parts={dict(parts or {})}, max_rows={max_rows}: give"
            " running servers as teacher.addresses=[http://HOST:8000], or of each part of a"
            " mixture as +teacher.parts.PART=[http://HOST:8000], and rows > 0"
        )
    keys = {part: f"teacher.parts.{part}" if part else "teacher.addresses" for part in given}
    return ServedTeachers(
        "vllm",
        {
            part: served(own, model=model, max_rows=max_rows, key=keys[part])
            for part, own in given.items()
        },
        word="+teacher.parts.PART=[http://HOST:8000]",
    )


class ServedTeacher:
    """A model behind one or several `vllm serve` processes. Rows are assigned to the servers in
    turn.

    Args:
      addresses: URLs of the servers, all with the same model.
      max_rows: the most requests at once to each server, > 0.
      model: the model's name on the servers. None accepts any model.
      key: the config key of the addresses, for messages.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        model: str | None = None,
        max_rows: int = 64,
        key: str = "teacher.addresses",
    ):
        self.servers = [Server(url, max_rows=max_rows) for url in addresses]
        self.model = model
        self.checked = False
        self.key = key

    def check(self, path: str, **hub: Any) -> None:
        """Check that every server answers, serves the model, and gives each id of the policy's
        tokenizer the same text.

        Raises: ConfigError.
        """
        if not self.checked:
            tokenizer = pretrained_tokenizer(path, **hub)
            run(run_together(self._check(server, tokenizer, path) for server in self.servers))
            self.checked = True

    async def _check(self, server: Server, tokenizer: Any, path: str) -> None:
        try:
            await server.meet()
            if self.model not in (None, server.name):
                raise ConfigError(
                    f"teacher.model={self.model}: {server.url} serves {server.name}; name that, or"
                    " another address"
                )
            ids = sorted(tokenizer.get_vocab().values())
            if await _differs(server, tokenizer, ids):
                # bisect: the length of the shortest differing prefix is in (same, odd]
                same = 0
                odd = len(ids)
                while odd - same > 1:
                    middle = (same + odd) // 2
                    same, odd = (
                        (same, middle)
                        if await _differs(server, tokenizer, ids[:middle])
                        else (middle, odd)
                    )
                raise ConfigError(
                    f"{self.key}: {server.url} serves {server.name}, which has another vocabulary"
                    f" than model.path={path} (the first token that differs is"
                    f" {tokenizer.convert_ids_to_tokens(ids[odd - 1])!r}, id {ids[odd - 1]}); serve"
                    " a model with the same tokenizer"
                )
        except Lost as error:
            raise ConfigError(
                f"{self.key}: {server.url} does not answer ({error}); start it with `vllm serve"
                " MODEL`"
            ) from error
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.key}: {server.url} cannot be a teacher: {error}; start it with `vllm serve"
                " MODEL`"
            ) from error

    def score_tokens(
        self, ids: Tensor, mask: Tensor, *, divergence: Callable[..., Any], columns: int
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Score tokens as `rlkit.types.TokenScorer` describes."""
        return self.read(ids, mask, k=count_named_tokens(divergence) or 0, columns=columns)

    def read(
        self, ids: Tensor, mask: Tensor, *, k: int, columns: int
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Ask the servers for the log-probs of the sampled tokens. Return the answers in the form
        of a model's last hidden states and its head.

        Args:
          ids: [B, T] int64.
          mask: [B, T] bool, True on the M sampled tokens.
          k: number of the likeliest tokens to read, ≥ 0.
          columns: V, the size of the policy's vocabulary.
        Returns: [M, 2k + 3] float32 in the order of the mask, and the function from rows of it to
        log-probs [m, V].
        Raises: EngineError if no server answers, if a server refuses, or if a row is too long for
        it.
        """
        rows = [
            (i, own.nonzero().flatten().tolist()) for i, own in enumerate(mask.cpu()) if own.any()
        ]
        asked = ((n, ids[i, : at[-1] + 1].tolist(), k) for n, (i, at) in enumerate(rows))
        found = run(run_together(self._score(*row) for row in asked))
        table = [
            _entry(said[t], k, columns)
            for (_, at), said in zip(rows, found, strict=True)
            for t in at
        ]
        return torch.tensor(table, dtype=torch.float32, device=ids.device), functools.partial(
            _logits, columns=columns
        )

    async def _score(self, row: int, ids: list[int], k: int) -> list[Any]:
        """Read a row's log-probs from its own server. If this server does not answer, ask the next
        one."""
        why = ""
        for turn in range(len(self.servers)):
            server = self.servers[(row + turn) % len(self.servers)]
            try:
                return await server.score(ids, k)
            except Lost as error:
                why = f"{server.url} does not answer ({error})"
        raise EngineError(
            f"{self.key}: {why}, nor does another; start it again and go on with `rlkit train"
            " resume=RUN`"
        )


async def _differs(server: Server, tokenizer: Any, ids: list[int]) -> bool:
    return await server.decode_text(ids) != tokenizer.decode(ids)


def _entry(said: Mapping[str, Mapping[str, float]], k: int, columns: int) -> list[float]:
    """Make the table entry of one position: k + 1 ids, their log-probs, and the log-prob of each
    other token. If the server gave fewer ids, the first id is repeated."""
    named = [(float(token), max(entry["logprob"], math.log(TINY))) for token, entry in said.items()]
    left = max(1 - math.fsum(math.exp(logp) for _, logp in named), TINY)
    other = math.log(left / max(1, columns - len(named)))
    named += named[:1] * (k + 1 - len(named))
    return [*(token for token, _ in named), *(logp for _, logp in named), other]


def _logits(table: Tensor, *, columns: int) -> Tensor:
    named = table.shape[-1] // 2
    return table[:, -1:].expand(-1, columns).scatter(1, table[:, :named].long(), table[:, named:-1])


def served(
    addresses: Sequence[str],
    *,
    model: str | None = None,
    max_rows: int = 64,
    key: str = "teacher.addresses",
) -> Reference:
    """Make a reference from a model on servers. Its `model` gives a `ServedTeacher`, and the
    streams ask the servers in place of a forward pass."""
    teacher = ServedTeacher(addresses, model=model, max_rows=max_rows, key=key)
    init = functools.partial(_meet, served=teacher)
    return Reference(
        "vllm",
        init,
        lambda state, policy, **_: state,
        functools.partial(_open_itself, teacher),
        lambda state: {},
        _load_nothing,
        check=teacher.check,
    )


def _meet(policy: Any, *, served: ServedTeacher, **_: Any) -> None:
    own = base_model(policy)
    served.check(own.name_or_path or "tiny")


@contextmanager
def _open_itself(teacher: ServedTeacher, state: None, policy: nn.Module) -> Iterator[ServedTeacher]:
    yield teacher


def _load_nothing(state: None, policy: nn.Module, saved: Mapping[str, Any]) -> None:
    return None
