"""Several processes that train together: their ranks, how they are started, Lightning's
strategies.

Files in the order of their imports: launch, ranks, strategies.
"""
