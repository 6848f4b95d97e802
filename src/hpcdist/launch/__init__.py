"""Launch: how this process was started, where it runs, and how it finds the others."""
