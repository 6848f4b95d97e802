"""Collectives through the memory that the ranks of one node share."""
