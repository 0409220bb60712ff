"""Open a trained adapter, predict and evaluate."""
