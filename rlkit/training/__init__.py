"""Train a policy in one run: the RL step, its references and schedules, the metrics, and the
callbacks around the step.

Files in the order of their imports: glossary, kernels, loggers, references, schedules, teachers,
experiment, activations, windows, metrics, reference_states, resume, selfcheck, update, callbacks,
groups, learner, ahead, reuse, module, run.
"""
