"""Keep the weights of a run's references and teachers. A reference belongs to a phase or to the
whole run. A teacher belongs to a part of the data mixture or to all prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rlkit.distributed import ranks
from rlkit.models.fused import get_update_kernel
from rlkit.models.head import split_model
from rlkit.training import schedules
from rlkit.training.experiment import Experiment
from rlkit.training.references import is_policy, is_start, move_reference, shard_state
from rlkit.training.schedules import Progress
from rlkit.types import Reference


class ReferenceStates:
    """Keep the state of every reference and teacher of a run (`rlkit.types.Reference`).

    A phase with its own reference owns this reference from the phase's first step on. All other
    phases share the run's reference; its owner is "". A teacher belongs to a part of a mixture, or
    to all prompts ("").

    Args:
      experiment: of the whole run.
      model: the policy's model.
    """

    def __init__(self, experiment: Experiment, model: nn.Module):
        self.experiment = experiment
        self.model = model
        # name of a phase → its whole experiment; the only name is "" if there are no phases
        self.phases = schedules.list_phases(experiment)
        self.phase = next(iter(self.phases))
        # a function that shards a model in place; None unless the policy is sharded
        self.lay_out: Callable[[Any], None] | None = None
        self.references: dict[str, Any] = {}
        if any(x.needs_reference for name, x in self.phases.items() if not self.find_owner(name)):
            self.references[""] = experiment.reference.init(model, step=0)
        # part of a mixture → its teacher; empty if no phase has a teacher
        self.teacher_functions: Mapping[str, Reference] = (
            experiment.teacher.models if experiment.needs_teacher else {}
        )
        self.teachers = {
            part: teacher.init(model, step=0) for part, teacher in self.teacher_functions.items()
        }

    def find_owner(self, phase: str) -> str:
        """Return the owner of a phase's reference: the name of the phase itself, or "" for the
        run."""
        phases = self.experiment.schedule.phases
        return phase if phase in phases and phases[phase].reference is not None else ""

    @property
    def owner(self) -> str:
        """Return the owner of the reference in the present phase."""
        return self.find_owner(self.phase)

    def measures_drift(self, phase: str, x: Experiment) -> bool:
        """Return whether, in this phase, the KL to the reference is also the distance from the
        start of the run.

        Args:
          x: the experiment of the phase.
        """
        names = list(self.phases)
        restarted = any(
            "reference" in self.experiment.schedule.phases[name].reset
            for name in names[1 : names.index(phase) + 1]
        )
        own = self.find_owner(phase) or restarted
        return x.kl.active and not own and is_start(x.reference)

    def find_functions(self, owner: str) -> Reference:
        """Return the functions of an owner's reference (init, update and others)."""
        return self.phases[owner].reference if owner else self.experiment.reference

    def enter(self, progress: Progress, reference: Reference) -> bool:
        """Begin the phase given by `progress`, and drop every reference that no later phase uses.
        Return whether the phase's reference starts from the present policy."""
        names = list(self.phases)
        self.phase = names[progress.phase]
        fresh = bool(self.owner) or "reference" in schedules.find_resets(self.experiment, progress)
        # the run's own reference also starts again for a later phase that compares with it
        if fresh and (self.phases[self.phase].needs_reference or self.owner in self.references):
            state = reference.init(self.model, step=progress.since)
            self.references[self.owner] = self._lay_out(state)
        needed = {self.find_owner(later) for later in names[progress.phase :]}
        self.references = {key: state for key, state in self.references.items() if key in needed}
        return fresh

    @contextmanager
    def reference(self, reference: Reference) -> Iterator[Any]:
        """Yield the model that computes the log-probs of the present phase's reference."""
        with self._use_as_policy(
            reference.model(self.references.get(self.owner), self.model)
        ) as model:
            yield model

    @contextmanager
    def teacher(self, part: str) -> Iterator[Any]:
        """Yield the model of a teacher. The teacher belongs to a part of the mixture, or to all
        prompts ("")."""
        functions = self.teacher_functions[part]
        with self._use_as_policy(functions.model(self.teachers[part], self.model)) as model:
            yield model

    @contextmanager
    def _use_as_policy(self, given: Any) -> Iterator[Any]:
        """Yield the model of a reference or a teacher. The model uses the same update kernel as the
        policy, also in a resumed run."""
        with given as model:
            if isinstance(model, nn.Module):
                trunk, own = (split_model(one)[0] for one in (model, self.model))
                trunk.update_kernel = get_update_kernel(own)
                if trunk is not own:  # a copy is read without gradient, so it recomputes nothing
                    trunk.gradient_checkpointing = False
            yield model

    def is_policy(self, reference: Reference) -> bool:
        """Return whether the present phase's reference is known to equal the present policy."""
        return is_policy(reference, self.references.get(self.owner), self.model)

    def move(self, reference: Reference, *, step: int, kl: float) -> dict[str, float]:
        """Update the present phase's reference and the teachers, after a step's updates. Return the
        metrics of the reference's update.

        Args:
          step: RL steps done, this one included.
          kl: the step's mean KL to the reference.
        """
        measured: dict[str, float] = {}
        if self.owner in self.references:
            state = self.references[self.owner]
            self.references[self.owner], measured = move_reference(
                reference, state, self.model, step=step, kl=kl
            )
        for part, functions in self.teacher_functions.items():
            self.teachers[part], _ = move_reference(
                functions, self.teachers[part], self.model, step=step, kl=float("nan")
            )
        return measured

    def shard(self, mesh: Any, *, mixed: bool) -> None:
        """Shard the policy over the ranks of a mesh (FSDP2), and references and teachers in the
        same way. The critic is not sharded, because a backward pass allows only one FSDP root.

        Args:
          mixed: whether weights are gathered in bfloat16.
        """
        gathered = torch.bfloat16 if mixed else None
        self.lay_out = partial(ranks.shard, mesh=mesh, gathered=gathered)
        self.lay_out(self.model)
        self.references = {owner: self._lay_out(state) for owner, state in self.references.items()}
        self.teachers = {part: self._lay_out(state) for part, state in self.teachers.items()}

    def _lay_out(self, state: Any) -> Any:
        """Return the state, sharded if the policy is sharded."""
        return state if self.lay_out is None else shard_state(state, self.model, self.lay_out)

    def save(self) -> dict[str, Any]:
        """Return all states as plain types and tensors, for a checkpoint. If the weights are
        sharded, all ranks must call this method."""
        return {
            "references": {
                owner: ranks.gather_tensors(self.find_functions(owner).save(state), for_file=True)
                for owner, state in self.references.items()
            },
            "teachers": {
                part: ranks.gather_tensors(self.teacher_functions[part].save(state), for_file=True)
                for part, state in self.teachers.items()
            },
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the value of `save` into the states of the present phase."""
        self.references = {
            owner: self.find_functions(owner).load(
                state, self.model, saved["references"].get(owner, {})
            )
            for owner, state in self.references.items()
        }
        self.teachers = {
            part: self.teacher_functions[part].load(
                state, self.model, saved["teachers"].get(part, {})
            )
            for part, state in self.teachers.items()
        }
