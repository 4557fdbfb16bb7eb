"""From options to a checked experiment: composing it, its schema, and everything that finds what
cannot run."""
