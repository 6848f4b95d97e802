"""How this process was started, and how it finds the others."""
