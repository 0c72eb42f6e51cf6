"""A torch step -> Trace; the text and file forms of a Trace; imports from other tools."""
