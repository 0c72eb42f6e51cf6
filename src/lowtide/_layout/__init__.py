"""Where: lifetimes and sizes -> offsets in one block of memory, as low as can be."""
