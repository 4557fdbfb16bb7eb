"""Play many episodes at the same time, from tasks to finished rollouts. Training, evaluation and
plain rollouts use the same function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from rlkit.engines import Cached
from rlkit.environments import find_environment
from rlkit.episodes.episode import mark_failed, play
from rlkit.episodes.replies import Encode, check_engine, make_encoder, make_speaker
from rlkit.errors import ConfigError, Hung, suggest_name
from rlkit.functional import mix
from rlkit.models import load_policy
from rlkit.system import rng
from rlkit.system.copies import copy_value
from rlkit.system.loops import await_value, is_left, make_blocking, run_together, set_substitute
from rlkit.system.shared_state import guard_state
from rlkit.types import (
    Engine,
    Environment,
    Messages,
    Playing,
    Policy,
    Rollout,
    SamplingParams,
    Session,
    Step,
    Task,
)

KEYS = count()  # the next key; an engine identifies an episode by its key


class Start:
    """Let all episodes wait for each other before their first replies. Otherwise the order in which
    the first prompts become ready would decide which episodes decode together."""

    def __init__(self, *, waits: bool):
        self.waits, self.missing, self.all_here = waits, 0, asyncio.Event()

    def place(self) -> Place:
        """Register an episode. All episodes then wait until this episode is ready for its first
        reply."""
        self.missing += 1
        return Place(self)


class Place:
    """Hold the place of one episode in a `Start`. The episode reports here that it is ready for its
    first reply, and then waits until all other episodes are ready too."""

    def __init__(self, start: Start):
        self.start = start
        self.here = False

    def arrive(self) -> None:
        """Report that the episode is ready for its first reply, or that it is over."""
        self.start.missing -= not self.here
        self.here = True
        if not self.start.missing:
            self.start.all_here.set()

    async def ready(self) -> None:
        """Wait until every episode has arrived."""
        self.arrive()
        if self.start.waits:
            await self.start.all_here.wait()


class Speaker(NamedTuple):
    """Hold a model, its engine, its sampling parameters and its encoder of first prompts."""

    policy: Policy
    engine: Engine
    params: SamplingParams
    encode: Encode


class Turns:
    """Hold an engine's key for one episode, or for the two episodes of a game. The two players of a
    game can share a key, because only one of them asks for a completion at a time."""

    def __init__(self, key: int, players: int = 1):
        self.key = key
        self.players = players

    def leave(self, engine: Engine) -> None:
        """Give up an episode's use of the key, because the episode is over. When no episode uses
        the key any more, release the key in the engine."""
        self.players -= 1
        if not self.players:
            engine.release(self.key)


class Seat(NamedTuple):
    """Describe an episode's position in one call of `collect`: its task, group, sample, key and
    callbacks."""

    task: Task
    group: int
    sample: int
    turns: Turns
    place: Place
    done: Callable[[Rollout], None]
    spent: Callable[[float], None]
    table: Any = None  # the shared instance of a game; `player`: this episode's seat
    player: int = 0


def ignore_value(value: Any) -> None:
    """Ignore the value; a callback that does nothing."""


async def load_other_player(path: str, policy: Policy, params: SamplingParams) -> Speaker:
    """Load the opponent of a policy. The opponent samples with the policy's sampling parameters,
    but with admission="free": its engine never waits for the answer of an episode that is due soon.
    Otherwise the policy's engine and the opponent's engine could wait for each other."""
    weights = next(policy.model.parameters())
    rival, engine = _load_player(path, str(weights.device))
    # load the weights only once: they never change, and episodes of other calls may be using them
    if not isinstance(engine, Cached) or engine.decoder is None:
        await await_value(engine.load(rival, 0))
    return Speaker(rival, engine, params._replace(admission="free"), make_encoder(rival))


@lru_cache(maxsize=1)
def _load_player(path: str, device: str) -> tuple[Policy, Engine]:
    rival = load_policy(path=path, device=device)
    rival.model.requires_grad_(False)
    return rival, Cached()


Played = Coroutine[Any, Any, Rollout]


def make_samples(
    how: Environment,
    task: Task,
    size: int,
    seat: Callable[..., Seat],
    alone: Callable[[Seat], Played],
    against: Callable[[Seat], Played],
) -> list[Played]:
    """Make the episodes of all samples of a task. Without a table, each sample plays alone. In a
    game, all samples share one table, or two samples share each table. At a table for two, a sample
    without a partner is played by `against`.

    Args:
      seat: function from (sample, table, player) to the Seat.
      alone, against: functions from a Seat to the coroutine of an episode.
    """
    if how.table is None:
        return [alone(seat(j)) for j in range(size)]
    make, players, opponent = how.table
    if not players:
        shared = make(copy_value(task), size)
        return [alone(seat(j, shared, j)) for j in range(size)]
    played: list[Played] = []
    for j in range(0, size - 1, 2) if opponent is None else ():
        first = seat(j, make(copy_value(task), 2))
        first.turns.players = 2
        played += [alone(first), alone(first._replace(sample=j + 1, player=1))]
    rest = [seat(j, make(copy_value(task), 2)) for j in range(len(played), size)]
    return played + [against(at._replace(player=(at.group + at.sample) % 2)) for at in rest]


async def collect_groups(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Environment | Callable[[Task], Environment],
    *,
    engine: Engine | None = None,
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    version: int = 0,
    on_done: Callable[[Rollout], None] | None = None,
    spent: Callable[[float], None] = lambda seconds: None,
    **params: Any,
) -> list[Rollout]:
    """Play `group_size` independent episodes of each task, all of them at the same time.

    `collect` is the blocking form of this coroutine. `collect` also works inside a running event
    loop.

    Args:
      policy: the model to sample, with its current weights.
      tasks: the prompts, one group per task.
      environment: one environment for all tasks, or a function from a task to its environment.
      engine: samples the completions. None makes a new `rlkit.engines.Cached()`. If you call this
        function many times, pass the same engine each time: its cache and its compiled code outlive
        a call.
      group_size: number of samples per task, > 0.
      seed, step: the run's seed and the number of the RL step. Together with the positions of the
        task and the sample, these two numbers are the only source of randomness
        (rlkit.functional.mix). Therefore the same call gives the same rollouts in any batch, on any
        rank. The numbers also seed the random generators of python, numpy and torch for the
        session. A plain tool runs in a thread, so its random numbers do not follow this seed.
      first: position of the first of these tasks in the RL step. The position is above 0 if an
        earlier call has played other prompts of the same step.
      version: number of RL steps that have trained the weights.
      on_done: called with the rollout of each episode as soon as the episode is over.
      spent: called at the end of each episode with the seconds that it spent in its session.
      params: fields of SamplingParams (temperature, max_new_tokens, …).
    Returns: unscored rollouts in the order of the tasks. The samples of a task are consecutive.
    Raises: the first error of any episode, unchanged. Every session is closed before it is raised.
    """
    unknown = [name for name in params if name not in SamplingParams._fields]
    if unknown:
        near = suggest_name(unknown[0], SamplingParams._fields)
        raise ConfigError(f"rlkit.collect: there is no '{unknown[0]}'.{near}")
    engine, sampling = Cached() if engine is None else engine, SamplingParams(**params)
    check_engine(engine)
    await await_value(engine.load(policy, version))
    start, own = (
        Start(waits=sampling.admission != "free"),
        Speaker(policy, engine, sampling, make_encoder(policy)),
    )

    async def episode(who: Speaker, how: Environment, at: Seat) -> Rollout:
        task = at.task
        draws = mix(seed, step, at.group, at.sample)
        if at.table is not None:
            how = how._replace(session=lambda task: at.table.player(at.player))
        speak = make_speaker(
            who.policy, how, who.engine, who.params, key=at.turns.key, seed=draws, encode=who.encode
        )

        async def say(rollout: Rollout, messages: Messages, session: Session) -> Step | None:
            if is_left():
                raise Hung("the episode is over")
            await at.place.ready()
            said = await speak(rollout, messages, session)
            # not every engine reports versions
            return said and said._replace(versions=said.versions or ((0, version),))

        held = [at]

        def release() -> None:
            while held:
                held.pop().turns.leave(who.engine)

        played = [Rollout(task, (), group=at.group, sample=at.sample)]

        def lost(error: BaseException) -> Rollout:
            release()
            at.place.arrive()
            if at.table is not None:
                at.table.lost(at.player, error)
            rollout = mark_failed(played[-1], str(error))
            at.done(rollout)
            return rollout

        async def converse() -> Rollout:
            return await play(
                task,
                how,
                say,
                group=at.group,
                sample=at.sample,
                seed=draws,
                said=release,
                spent=at.spent,
                so_far=played.append,
            )

        set_substitute(lost)
        try:
            if how.play is None:
                rollout = await converse()
            else:
                rollout = await how.play(
                    Playing(
                        task,
                        how,
                        who.policy,
                        who.engine,
                        who.params,
                        seed=draws,
                        keys=KEYS,
                        ready=at.place.ready,
                        give_way=at.place.arrive,
                        converse=converse,
                    )
                )
                steps = tuple(
                    said._replace(versions=said.versions or ((0, version),))
                    for said in rollout.steps
                )
                rollout = rollout._replace(steps=steps, group=at.group, sample=at.sample)
        finally:
            release()
            at.place.arrive()
        rollout = name_limit(who.policy, rollout)
        if how.table is not None and how.table.players:
            rollout = rollout._replace(player=at.player)
        if not is_left():
            at.done(rollout)
        return rollout

    async def against(how: Environment, one: Seat) -> Rollout:
        """Play a sample without a partner: against the opponent model if the table has one,
        otherwise against the policy itself. The other side's episode is not used for training."""
        other = one._replace(
            sample=group_size + one.sample,
            player=1 - one.player,
            done=ignore_value,
            spent=ignore_value,
        )
        rival = own
        opponent = how.table and how.table.opponent
        if opponent is None:
            one.turns.players = 2
        else:
            rival = await load_other_player(opponent, policy, sampling)
            other = other._replace(turns=Turns(next(KEYS)), place=Start(waits=False).place())
        return (await run_together([episode(own, how, one), episode(rival, how, other)]))[0]

    def make_group(task: Task, i: int) -> list[Played]:
        how = find_environment(environment, task)

        def seat(j: int, table: Any = None, player: int = 0) -> Seat:
            return Seat(
                task,
                i,
                j,
                Turns(next(KEYS)),
                start.place(),
                on_done or ignore_value,
                spent,
                table,
                player,
            )

        # Episodes that share a table wait for each other's replies. Therefore the engine must not
        # hold back a prompt until another episode's prompt arrives: the other episode may be
        # waiting for the reply to this prompt.
        shared = how.table is not None and not how.table.players
        who = own._replace(params=sampling._replace(admission="free")) if shared else own
        return make_samples(
            how, task, group_size, seat, partial(episode, who, how), partial(against, how)
        )

    with rng.keep_generators(), guard_state(environment):
        return await run_together(
            (coroutine for i, task in enumerate(tasks, first) for coroutine in make_group(task, i)),
            announced=True,
        )


collect = make_blocking(collect_groups, name="collect")


def name_limit(policy: Policy, rollout: Rollout) -> Rollout:
    """Return the rollout. If the last reply ended because the model's context was full, change the
    rollout's truncation from "length" to "context"."""
    if rollout.truncation != "length":
        return rollout
    last = rollout.steps[-1]
    full = last.prompt_length + len(last.response_ids) >= policy.context_length
    return rollout._replace(truncation="context") if full else rollout
