"""The facade: torch.distributed's names and signatures, each a thin call on the engine."""
