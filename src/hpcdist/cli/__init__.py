"""What ``python -m hpcdist`` can do; each command is imported when it is called."""
