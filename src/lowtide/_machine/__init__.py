"""What a machine can do: measured here, or read from a profile."""
