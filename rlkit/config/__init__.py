"""From options to a checked experiment: composing it, its schema, and everything that finds what
cannot run.

Files in the order of their imports: changes, functions, hints, options, suggestions, schema, parts,
problems, trust, compose, keys, experiment, origins.
"""
