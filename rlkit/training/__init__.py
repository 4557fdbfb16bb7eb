"""Train a policy in one run: the RL step, its references and schedules, the metrics, and the
callbacks around the step.

Each file imports only files before it in this list: glossary, kernels, loggers, references,
schedules, teachers, experiment, activations, windows, metrics, reference_states, resume, selfcheck,
update, callbacks, groups, learner, ahead, reuse, module, run.
"""
