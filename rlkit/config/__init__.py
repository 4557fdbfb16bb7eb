"""Turn options into a checked experiment: compose the config, check it against its schema, and find
every setting that the run cannot use.

Files in the order of their imports: changes, functions, hints, options, suggestions, schema, parts,
problems, trust, compose, keys, experiment, origins.
"""
