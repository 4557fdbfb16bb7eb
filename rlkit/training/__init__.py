"""One training run: the step, its references and schedules, what is measured, and the callbacks
around it.

Files in the order of their imports: glossary, kernels, loggers, references, schedules, teachers,
experiment, activations, windows, metrics, reference_states, resume, selfcheck, update, callbacks,
groups, learner, ahead, reuse, module, run.
"""
