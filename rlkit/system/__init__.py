"""Access to the machine: files, processors, devices, deadlines, random numbers, and the ownership
of run folders.

Files in the order of their imports: adapters, copies, extras, files, fingerprints, leaving,
parent, plain_files, processors, redaction, sharding, shared_state, device, digest, identity, noted,
output, owner, rng, rows, shards, waiting, contents, loops, deadline.
"""
