"""Watchdog, flight recorder, fingerprints: what keeps a job from hanging in silence."""
