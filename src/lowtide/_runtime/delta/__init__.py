"""Memory held under a budget from the first op on, with no knowledge of what comes (DELTA).

Rules, in the order in which they were written down:

1. Only what nobody but lowtide can reach may leave: storages saved for backward on which only the
   handles' own tensors lie (`swap.cell`).
2. What is dropped can be made again: its recipe leads, over ops that may be repeated, to values
   that are held, or saved themselves. Those are its *sources*, and none of them is let go or
   written to before the value is back.
3. A recipe is relied on only after the bytes it makes were once compared with the original's.
4. Room is made before an op runs, for what it is going to make; what is still too much for the
   device is caught at the op, and the op is run again when there is room.
5. Nothing refers to anything in a circle: what the program lets go is gone at once. (But for a
   value that is only there for others to be made from it, and its cell: undone when they are.)
"""
