"""Swaps on a machine -> how long a step takes, what it holds, and what hides what."""
