"""Code shared by the tasks: base class, encoded rows, batches, losses, metrics and templates."""
