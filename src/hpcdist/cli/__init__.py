"""The commands of ``python -m hpcdist``; each is imported when it is called."""
