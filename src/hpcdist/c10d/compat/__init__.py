"""Names of earlier releases of torch, which keep working: PyTorch 1.6's, and torch 2.8's dist2."""
