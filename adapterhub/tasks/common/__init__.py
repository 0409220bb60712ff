"""What tasks share: their base class, encoded rows, batches, losses, metrics and templates."""
