"""The registry: published, immutable versions of adapters, per backbone, in any store."""
