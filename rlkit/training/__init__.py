"""One training run: the step, its references and schedules, what is measured, and the callbacks
around it."""
