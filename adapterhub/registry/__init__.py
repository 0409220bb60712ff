"""Published, immutable versions of adapters in any store: a folder, the Hub. Handles files; only
`load` touches a model."""
