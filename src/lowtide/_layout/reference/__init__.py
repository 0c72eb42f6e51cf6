"""The native search once more, to be read: same steps, same answer, slower.

It answers where there is no compiler, and the native one is tested against it.
"""
