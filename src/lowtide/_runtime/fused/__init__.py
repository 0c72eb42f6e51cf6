"""Element-wise ops that run again one after the other, run as one kernel.

1. A *program* is what a row of calls computes, element by element: what it reads from memory, the
   steps, and which of their results are wanted. The rest never is in memory.
2. Every step rounds as the op does that it stands for: the result is the same to the last bit, or
   the program is not used. That is tried on random numbers when its kernel is made, against PyTorch
   op by op; and when it is first wanted the calls run one by one, and all that the program
   makes is compared with what they have made.
3. Bytes are counted in the order in which they lie: tensors that are read as a whole lie alike
   and without holes, and what is made lies as they do: a call of which PyTorch says otherwise is
   no part of a program. Any other tensor is read by its strides.
4. As one they need all at once what they read and what is wanted of them. Where there is no room
   for that, they run one by one.
"""
