"""Access to the machine: files, processors, devices, deadlines, random numbers, and the ownership
of run folders.

Each file imports only files before it in this list: adapters, copies, extras, files, fingerprints,
leaving, parent, plain_files, processors, redaction, sharding, shared_state, device, digest,
identity, noted, output, owner, rng, rows, shards, waiting, contents, loops, deadline.
"""
