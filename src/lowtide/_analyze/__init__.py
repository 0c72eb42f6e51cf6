"""Trace -> facts about it: load, peak, gaps, what can be recomputed, where the step repeats."""
