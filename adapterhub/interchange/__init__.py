"""Other libraries' adapters, translated to and from ours with the anatomy of a backbone."""
