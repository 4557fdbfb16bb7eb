"""Several processes that train together: their ranks, how they are started, Lightning's
strategies."""
